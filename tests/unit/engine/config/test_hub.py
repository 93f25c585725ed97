"""Names on the Hugging Face Hub, against a stand-in: what is a name, which files are fetched, and what is said."""

import ast
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.config import FETCHED, recipe_options
from engine.config.hub import HUB, INDEX, HubName, _files, parse_name
from tests.lib.hub import Hub, serving
from tests.lib.processes import run_python
from tests.lib.recipes import minimal, write_minimal
from tests.lib.root import ROOT


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-4B", HubName("", "Qwen/Qwen3-4B", "main", "")),
        ("Qwen/Qwen3-4B@v1.0", HubName("", "Qwen/Qwen3-4B", "v1.0", "")),
        ("Qwen/Qwen3-4B@refs/pr/3", HubName("", "Qwen/Qwen3-4B", "refs/pr/3", "")),
        ("hf://Qwen/Qwen3-4B", HubName("hf://", "Qwen/Qwen3-4B", "main", "")),
        ("hf://datasets/a/b@x/c/d-*.jsonl", HubName("hf://datasets/", "a/b", "x", "c/d-*.jsonl")),
        *((path, None) for path in ("./Qwen/x", "/Qwen/x", "../x", "~/x", "x", "a/b/c", "here/x", "made/x", "a/b@c/d")),
        *((path, None) for path in ("models/Qwen3-4B", "datasets/x", "chats/train.jsonl", "chats/x.txt")),
        *((path, None) for path in ("a/", "/a", "a//b", "", "a b/c", "-a/b", "a/b\n", "hf://a", "made/link")),
    ],
)
def test_what_is_local_or_looks_like_it_is_no_name(tmp_path, monkeypatch, path, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "made" / "x").mkdir(parents=True)
    (tmp_path / "made" / "link").symlink_to("nowhere")
    assert parse_name(path) == name


def test_a_local_directory_with_the_name_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen3-4B@main").mkdir(parents=True)
    assert parse_name("Qwen/Qwen3-4B@main") is None


MODEL = {
    **dict.fromkeys(("config.json", "tokenizer.json", "generation_config.json"), "{}"),
    **dict.fromkeys(("tokenizer.model", "merges.txt", "chat_template.jinja"), "t"),
    "additional_chat_templates/rag.jinja": "rag",
    "model-00001-of-00002.safetensors": "one",
    "model-00002-of-00002.safetensors": "two",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ),
}
CODE = {"modeling.py": "raise SystemExit"}
# Each with contents of its own, since the cache holds equal files once.
NEVER = (
    "pytorch_model.bin pytorch_model-00001-of-00001.bin consolidated.00.pth training_args.bin optimizer.pt x.pkl "
    "model.gguf consolidated.safetensors original/params.json original/model.safetensors README.md run.sh x.npz "
    "tf_model.h5 onnx/model.onnx notes.txt .gitattributes x.ckpt flax.msgpack"
)
RESOLVE = """
import json, sys
from engine.config.hub import HubError, named, local_paths
found = []
for path, options in json.loads(sys.argv[1]):
    try:
        paths = local_paths(path, **options)
        found.append([paths, named(paths)])
    except HubError as error:
        found.append(str(error))
print(json.dumps([found, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


def write(folder: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def asked(hub: Hub, *questions: Any, **environment: str) -> list[Any]:
    """Answers of a process to paths with options, and nothing heavy is imported for them."""
    process = hub.start(
        RESOLVE, json.dumps([one if isinstance(one, list) else [one, {}] for one in questions]), **environment
    )
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    found, heavy = json.loads(out)
    assert heavy == []
    return found


@pytest.fixture
def hub(tmp_path):
    with serving(tmp_path) as found:
        found.model = write(tmp_path / "model", {**MODEL, **CODE, **{name: f"never {name}" for name in NEVER.split()}})
        found.commit = found.add("models/Qwen/Tiny", found.model, "v1")
        yield found


def files(directory: str) -> set[str]:
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}


def test_only_files_that_are_read_are_fetched(hub):
    small, whole, code = asked(
        hub, ["Qwen/Tiny", {"weights": False}], "Qwen/Tiny@v1", [f"hf://Qwen/Tiny@{hub.commit}", {"code": True}]
    )
    directory = str(hub.cache / "hub" / "models--Qwen--Tiny" / "snapshots" / hub.commit)
    assert small == whole == code == [[directory], [f"Qwen/Tiny@{hub.commit}"]]
    assert files(directory) == {*MODEL, *CODE}
    before = len(hub.asked)
    for line in (r"^Qwen/Tiny: downloading [2-9] files", r"^(?!.*downloading)"):  # then they are in the cache
        process = hub.start(RESOLVE, json.dumps([["Qwen/Tiny", {}]]), HF_HOME=str(hub.cache.with_name("shown")))
        assert re.search(line, process.communicate()[1], re.DOTALL), line
    cold = hub.cache.with_name("cold")
    (((found,), _),) = asked(hub, ["Qwen/Tiny", {"weights": False}], HF_HOME=str(cold))
    assert files(found) == {name for name in MODEL if not name.endswith(".safetensors")}
    (((found,), _),) = asked(hub, "Qwen/Tiny", HF_HOME=str(cold))
    assert files(found) == {*MODEL}
    assert not [line for line in hub.asked[before:] if any(f"/{name}" in line for name in (*CODE, *NEVER.split()))]


def test_what_is_not_there_not_allowed_or_not_reached_is_said_in_a_line(hub, tmp_path):
    hub.add("models/Meta/Gated", hub.model)
    hub.gated.add("models/Meta/Gated")
    hub.add("models/Old/Bin", write(tmp_path / "bin", {"config.json": "{}", "pytorch_model.bin": "pickled"}))
    hub.add(
        "models/Half/Index",
        write(tmp_path / "half", {name: text for name, text in MODEL.items() if "2-of" not in name}),
    )
    deep = {"model.safetensors.index.json": '{"weight_map": ' + "[" * 200_000}
    hub.add("models/Deep/Index", write(tmp_path / "deep", MODEL | deep))
    missing, revision, gated, pickled, half, nested, data = asked(
        hub,
        *("Qwen/Other", "Qwen/Tiny@v2", "Meta/Gated", "Old/Bin", "Half/Index", "Deep/Index"),
        "hf://datasets/Qwen/Tiny",
    )
    assert missing == "it is not there, or private: `hf auth login` or HF_TOKEN gives access"
    assert revision == "it has no revision 'v2', expected a branch, a tag or a commit"
    assert gated.startswith("its owner grants access: ask on https://huggingface.co/Meta/Gated, then")
    assert pickled.startswith("it has no model.safetensors, expected safetensors; found pytorch_model.bin: pickled")
    assert half.startswith("it has no model-00002-of-00002.safetensors, expected safetensors")
    assert nested.startswith(
        "model.safetensors.index.json is damaged (RecursionError: maximum recursion depth exceeded"
    )
    assert data == "expected hf:// before the name"
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    (unreached,) = asked(hub, "Qwen/Tiny", **closed)
    assert unreached.startswith("the cache does not have it, and the Hub cannot be reached (ConnectError: ")
    (offline,) = asked(hub, "Qwen/Tiny", HF_HUB_OFFLINE="1")
    assert offline == "the cache does not have it, and the Hub is not asked (HF_HUB_OFFLINE is set)"
    (online,) = asked(hub, ["Qwen/Tiny", {"weights": False}])
    (half,) = asked(hub, "Qwen/Tiny", HF_HUB_OFFLINE="1")
    assert half.startswith("the cache has only some of its files, and the Hub is not asked (HF_HUB_OFFLINE is set)")
    (whole,) = asked(hub, "Qwen/Tiny")
    before = len(hub.asked)
    for environment in (closed, {"HF_HUB_OFFLINE": "1"}):
        assert asked(hub, "Qwen/Tiny", f"Qwen/Tiny@{hub.commit}", **environment) == [whole, whole]
    assert online == whole and len(hub.asked) == before


def test_a_data_set_is_its_training_files_or_those_that_are_named(hub, tmp_path):
    names = [
        "data/train-0.jsonl",
        "data/train-1.jsonl",
        "data/test-0.jsonl",
        "dataset_infos.json",
        "README.md",
        "x.pkl",
    ]
    hub.add("datasets/user/split", write(tmp_path / "split", dict.fromkeys(names, "{}")))
    hub.add(
        "datasets/user/plain", write(tmp_path / "plain", dict.fromkeys(["a.json", "validation.json", "b.txt"], "{}"))
    )
    split, test, plain, text, nothing, none = asked(
        hub,
        *(["user/split", {"kind": "chat"}], ["hf://datasets/user/split/data/test-*.jsonl", {"kind": "chat"}]),
        *(["user/plain", {"kind": "chat"}], ["user/plain", {"kind": "text"}], ["user/split", {"kind": "text"}]),
        ["hf://datasets/user/plain@main/c.json", {"kind": "chat"}],
    )
    assert [Path(path).name for path in split[0]] == ["train-0.jsonl", "train-1.jsonl"]
    assert [Path(path).name for found in (test, plain, text) for path in found[0]] == [
        "test-0.jsonl",
        "a.json",
        "b.txt",
    ]
    commit = Path(test[0][0]).parents[1].name
    assert test[1] == [f"hf://datasets/user/split@{commit}/data/test-0.jsonl"]
    assert nothing.startswith(
        "it has no file of training samples that ends in .txt or .txt.gz or .txt.zst; name one as "
        "hf://datasets/user/split/FILE"
    )
    assert none.startswith("it has no c.json; ") and "a.json, b.txt" in none
    assert not {"x.pkl", "dataset_infos.json", "validation.json"} & hub.fetched()


def test_one_process_of_a_machine_asks_and_the_others_take_its_answer(hub):
    questions = json.dumps([["Qwen/Tiny", {}], ["Qwen/Other", {}]])
    ranks = [hub.start(RESOLVE, questions, WORLD_SIZE="3", RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(3)]
    found = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], found
    assert len({out for out, _ in found}) == 1 and "it is not there" in found[0][0]
    for repo in ("Qwen/Tiny", "Qwen/Other"):
        assert len([line for line in hub.asked if f"/api/models/{repo}/revision/" in line]) == 1
    assert [err.count(hub.commit) for _, err in found] == [1, 0, 0]  # rank 0 says it
    hub.repos.clear()
    (folder,) = hub.cache.parent.glob("deepqat-hub-*")
    for file in folder.iterdir():  # a job that starts half a second later does not take an old answer
        file.write_text(json.dumps(json.loads(file.read_text()) | {"time": time.time() - 0.5}))
    before = len(hub.asked)
    (answer,) = asked(hub, "Qwen/Tiny", WORLD_SIZE="3")
    assert answer[1] == [f"Qwen/Tiny@{hub.commit}"]  # from the cache
    assert len([line for line in hub.asked[before:] if "/api/models/Qwen/Tiny/revision/" in line]) == 1


# Options of text in the recipe, and options of scripts that are no numbers, choices or switches, which take no name.
# "a file" is what ranks must have alike (tests/unit/engine/cluster/test_nodes.py).
LOCAL_OPTIONS = {
    **dict.fromkeys(("output_dir", "export.dir", "data.cache"), "written"),
    "deepspeed": "a name in ds_configs/, or a JSON file",
    "model.attn_implementation": "a name of transformers",
    "loss.teacher_cache": "a file that launch/cache_teacher.py made of the same samples",
    "export.template": "a file of llama.cpp's",
    "export.max_shard_size": "a size",
    **dict.fromkeys(("quant.scheme", "quant.lm_head", "quant.embedding"), "names of schemes"),
    **dict.fromkeys(
        ("quant.exempt", "quant.exempt_more", "quant.rotate", "learnable.freeze", "adapter.targets"), "patterns"
    ),
    "data.server": "an address",
    "data.skip": "lines of files",
    "train.resume": "a step of output_dir",
    "train.report_to": "names of trackers",
}
LOCAL_SCRIPT_OPTIONS = {
    "--checkpoint": "a training checkpoint: DeepSpeed's files, with this machine's recipe",
    **dict.fromkeys(("--out", "--json", "--keep", "--logs"), "written"),
    **dict.fromkeys(("--text", "--task_dir", "--results", "--measured", "--template", "file"), "files of the user's"),
    **dict.fromkeys(("--engine_python", "--launcher"), "programs"),
    **dict.fromkeys(("--schemes", "--strategies", "--tasks", "--line", "--config"), "names, lines or a recipe"),
    "--local_rank": "of the launcher",
    "--gguf": "one file, which transformers' names of models do not mean",
}


def test_every_option_that_takes_a_checkpoint_takes_a_name():
    """An option that is added must take names, or have a line above that says why not."""
    recipe = {key: item for key, _, item in recipe_options(minimal())}
    texts = {key for key, item in recipe.items() if "str" in str(item.type) and "dict" not in str(item.type)}
    named = {key for key, item in recipe.items() if HUB in item.metadata}
    assert {key.partition(".")[0] for key in named} == {*FETCHED}
    assert texts == {*LOCAL_OPTIONS, *named} and not named & LOCAL_OPTIONS.keys()
    assert named == {
        "model.path",
        "loss.teacher",
        "quant.start",
        "quant.scales",
        "adapter.start",
        "data.train",
        "data.eval",
    }
    unclear = []
    for path in sorted((ROOT / "launch").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
            ):
                continue
            option, given = ast.literal_eval(node.args[0]), {one.arg: ast.unparse(one.value) for one in node.keywords}
            kind, action = given.get("type", ""), given.get("action", "")
            takes_names = kind == "CheckpointName" or action == "NamedDirectories"
            other = (
                "choices" in given
                or action in ("'store_true'", "'version'")
                or kind in ("int", "float")
                or "int_from" in kind
            )
            if not (takes_names or other or option in LOCAL_SCRIPT_OPTIONS):
                unclear.append(f"{path.name}: {option}")
    assert unclear == []


SCRIPTS = """
import json, runpy, sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
import os
from huggingface_hub import constants
constants.ENDPOINT, constants.HF_HUB_OFFLINE = "http://127.0.0.1:9", False
constants.HF_HUB_CACHE = str(Path("cache").absolute())
root = sys.argv[2]
for script, *words in json.loads(sys.argv[1]):
    sys.argv, said = [script, *words], StringIO()
    try:
        with redirect_stderr(said):
            runpy.run_path(f"{root}/launch/{script}.py", run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code
    print(json.dumps([script, words, code, said.getvalue()]))
"""


def test_every_script_asks_for_the_names_that_it_is_given(tmp_path):
    """None of them is there, and each script says which option it is, in a line."""
    recipe = ["--config", str(write_minimal(tmp_path)), "--model.path", "no/such"]
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "text.txt").write_text("text")
    text = ["--text", "text.txt"]
    calls = [
        *(("model.path", [script, *recipe]) for script in ("train", "calibrate", "memory", "show_data")),
        ("model.path", ["study", *text, *recipe]),
        (
            "model.path",
            ["allocate", "--schemes", "w4a16_g32", "w2a16_g32", "--budget_bits", "3", "--out", "o", *recipe],
        ),
        (
            "model.path",
            ["cache_teacher", "--out", "cached", *recipe, *["--loss.teacher", "no/such", "--loss.top_k", "5"]],
        ),
        ("--model", ["rotate", "--model", "no/such", "--out", "out"]),
        ("--model", ["smooth", "--model", "no/such", "--out", "out", *text]),
        ("--model", ["evaluate", "--model", "no/such", *text]),
        ("--reference", ["evaluate", "--model", ".", "--reference", "no/such", *text]),
        ("--bf16", ["compare", "--bf16", "no/such", "--ptq", "a=.", *text]),
        ("--qat", ["compare", "--bf16", ".", "--qat", "a=no/such", *text]),
        ("--ptq", ["compare", "--bf16", ".", "--ptq", "a=no/such", *text]),
        ("--export", ["verify", "--export", "no/such"]),
        ("--against", ["verify", "--export", ".", "--against", "no/such"]),
    ]
    ended = run_python(SCRIPTS, json.dumps([words for _, words in calls]), ROOT, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('["')]
    assert len(found) == len(calls)
    for (key, _), (script, words, code, said) in zip(calls, found, strict=True):
        assert code == 2, (script, words, said)
        line = next(line for line in said.splitlines() if "no/such" in line and "expected" in line)
        assert (
            f"{key}: 'no/such'" in line
            and "Hugging Face Hub: the cache does not have it, and the Hub cannot be" in line
        )


@pytest.mark.parametrize(("kind", "more"), [("model", []), ("scales", ["kv_cache.safetensors"])])
def test_scales_are_fetched_from_files_outside_the_index_too(tmp_path, kind, more):
    """quant.scales reads all safetensors files of a local directory. llm-compressor writes scales of keys and values
    into a file that the index does not list."""
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    files = ["config.json", INDEX, "model-1.safetensors", "kv_cache.safetensors", "onnx/model.safetensors"]
    chosen = _files(tmp_path, files, kind, weights=True, code=False)
    assert chosen == ["config.json", INDEX, "model-1.safetensors", *more]
