"""The one place that knows how DeepSpeed keeps parameters.

Under ZeRO stage 3 a Parameter is a stub: its data is an empty tensor, its shape lies in ``ds_shape``, and each of the
``world`` ranks holds one contiguous chunk of ``ceil(numel / world)`` elements of the row-major flattened parameter in
``ds_tensor``. The chunk of the last ranks ends in padding when the elements do not share out evenly. Everything else in
this project asks this package, which answers for plain parameters too (stages 0-2), so that no other file has a branch
on the stage.

Filling a partition directly (:func:`local_data`) is allowed only before ``deepspeed.initialize``: the optimizer copies
the parameters into its fp32 master there, and the next step overwrites whatever was written to them afterwards.
"""

from model.zero.frozen import LeftOut
from model.zero.gather import ReceiveBuffer, batches, forward_only, gathered, gathered_on_main, whole_values
from model.zero.optimizer import (
    CHECKPOINT_CLASSES,
    CHECKPOINT_GLOBALS,
    OptimizerPiece,
    backward,
    flat_masters,
    global_gradient_norm,
    gradient_buffers,
    gradient_norm,
    master_weights,
    optimizer_pieces,
    reset_moments,
    reset_optimizer_state,
    use_masters,
    zero_parameters,
)
from model.zero.parameters import (
    INPUT_ALIASES,
    WHOLE_ELEMENTS,
    WHOLE_ELEMENTS_IN_ALL,
    forget_secondary_copies,
    full_numel,
    full_shape,
    init_process_group,
    is_partitioned,
    is_whole,
    keep_frozen_fp32,
    leaves_of_stage_3,
    local_data,
    local_gradient,
    local_range,
    mark_leaf,
    materialize,
    on_cuda,
    own_device,
    partition_new_parameters,
    partitions,
    release,
    set_local_gradient,
    stage,
    to_be_whole,
    upcast_named_buffers,
)

__all__ = [
    "CHECKPOINT_CLASSES",
    "CHECKPOINT_GLOBALS",
    "INPUT_ALIASES",
    "WHOLE_ELEMENTS",
    "WHOLE_ELEMENTS_IN_ALL",
    "LeftOut",
    "OptimizerPiece",
    "ReceiveBuffer",
    "backward",
    "batches",
    "flat_masters",
    "forget_secondary_copies",
    "forward_only",
    "full_numel",
    "full_shape",
    "gathered",
    "gathered_on_main",
    "global_gradient_norm",
    "gradient_buffers",
    "gradient_norm",
    "init_process_group",
    "is_partitioned",
    "is_whole",
    "keep_frozen_fp32",
    "leaves_of_stage_3",
    "local_data",
    "local_gradient",
    "local_range",
    "mark_leaf",
    "master_weights",
    "materialize",
    "on_cuda",
    "optimizer_pieces",
    "own_device",
    "partition_new_parameters",
    "partitions",
    "release",
    "reset_moments",
    "reset_optimizer_state",
    "set_local_gradient",
    "stage",
    "to_be_whole",
    "upcast_named_buffers",
    "use_masters",
    "whole_values",
    "zero_parameters",
]
