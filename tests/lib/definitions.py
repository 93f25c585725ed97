"""The losses as their definitions say, written out with probabilities: what the engine's losses are compared with."""

import torch


def kl(a, b):
    """KL(a || b) over the last dimension; terms with a = 0 are 0."""
    return torch.special.xlogy(a, a).sum(-1) - (a * b.clamp(min=torch.finfo(b.dtype).tiny).log()).sum(-1)


def lm_loss(student, labels):
    """Cross entropy per token from logits [N, V] and labels [N]."""
    return -student.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def kd_loss(kind, student, teacher, labels, *, temperature=1.0, top_k=1, tail=False):
    """Distillation loss per token from logits [N, V] and labels [N]; use fp64."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    if kind == "kl":
        return kl(p, q)
    if kind == "rkl":
        return kl(q, p)
    if kind == "cakld":
        confidence = p.gather(-1, labels[:, None])[:, 0].detach()
        return confidence * kl(q, p) + (1 - confidence) * kl(p, q)
    if kind == "kd":
        return temperature**2 * kl((teacher / temperature).softmax(-1), (student / temperature).softmax(-1))
    if kind == "mse":
        return (student - teacher).square().sum(-1) / student.shape[-1]
    # Logits that fp32 does not tell apart are equally likely, and chosen by their ids.
    likely = (teacher if kind == "kl_top_k" else student).detach().float().sort(descending=True, stable=True).indices
    chosen = likely[..., :top_k]
    inside = [x.gather(-1, chosen) for x in (p, q)]
    if tail:
        outside = [x.scatter(-1, chosen, 0.0).sum(-1, keepdim=True) for x in (p, q)]
        p, q = (torch.cat(pair, -1) for pair in zip(inside, outside, strict=True))
    else:
        p, q = (x / x.sum(-1, keepdim=True) for x in inside)
    return kl(p, q) if kind == "kl_top_k" else kl(q, p)
