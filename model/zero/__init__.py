"""Access to parameters, gradients and optimizer state as DeepSpeed stores them, for all ZeRO stages.

Under ZeRO stage 3 a Parameter is a stub: its data is an empty tensor, its shape is in ``ds_shape``, and each of the
``world`` ranks stores one contiguous chunk of ``ceil(numel / world)`` elements of the row-major flattened parameter in
``ds_tensor``. The chunks of the last ranks end in padding if the elements do not divide evenly. The functions of this
package also accept plain parameters (stages 0-2), so no other file branches on the stage.

Fill the partition of a trained parameter directly (:func:`local_data`) only before ``deepspeed.initialize``, which
copies it into the optimizer's fp32 master: the next step overwrites any later change.
"""

from model.zero.gather import ReceiveBuffer, batches, forward_only, gathered, gathered_on_main, whole_values
from model.zero.optimizer_state import (
    CHECKPOINT_CLASSES,
    CHECKPOINT_GLOBALS,
    COPIES,
    SWAPPED,
    OptimizerPiece,
    backward,
    check_space,
    copied,
    drop_gradients,
    flat_masters,
    global_gradient_norm,
    gradient_buffers,
    gradient_norm,
    load_async_io,
    master_weights,
    optimizer_pieces,
    reset_moments,
    reset_optimizer_state,
    swap_buffers,
    swap_files,
    swap_name,
    swapped_in,
    use_masters,
    zero_parameters,
)
from model.zero.parameters import (
    INPUT_ALIASES,
    WHOLE_ELEMENTS,
    WHOLE_ELEMENTS_IN_ALL,
    LeftOut,
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
    secondary_partitions,
    set_local_gradient,
    stage,
    to_be_whole,
    upcast_named_buffers,
)
