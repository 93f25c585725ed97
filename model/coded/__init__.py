"""Quantised weights travel as their codes (``quant.gather_codes``): one byte per weight instead of two, and the same
training.

Forward and backward of a quantised layer use its weight only through the quantiser. Where every rank knows the scales,
which are few, the rank that holds a part of a weight can quantise it before it is sent; a layer then finds the codes
in place of its weight (:func:`quant.held.stand_in`), and quantises nothing: the fp8 GEMM takes them as they are. What
the layer cannot know any more is the weight's distance from its code, on which its gradient's mask and theta's gradient
depend. So the weight gets the gradient with respect to the quantised weight, theta gets zeros, and after the reduction
the rank that holds the part applies the quantiser's rule to it, and makes theta's gradient, which takes the place of
the layer's (``parts.py``).

Against gathering the weights themselves: forward, the gradients of inputs and of weights are the same bit for bit. The
gradient of a learned scale is the sum of the same terms in another order, in fp32, where each micro-batch and rank
would have rounded its own to the model's dtype.

The rest of the project knows none of this. It offers, in general terms, ``Session.after_backward``, which runs between
the last backward and the update; ``QuantLayer.when_changed``, which is called when weights, scales or switches have
changed; and in the memory planner ``Inventory.gatherer`` and ``Inventory.beside``. All of them work without this
feature, and have no other user today.
To delete the feature:

* delete this folder, ``model/zero/as_bytes.py`` and ``engine/memory/coded.py``, the tests in
  ``tests/unit/model/coded/`` and ``tests/distributed/engine/test_gather.py``, and what other tests and ``docs/``
  say of ``gather_codes``;
* ``quant``: the two functions of stand-ins in ``held.py``, and what ``function.py`` does where there is one;
* ``engine/recipe``: the field ``gather_codes`` in ``quant.py``, and ``_gather_problems`` in ``ds_config.py``;
* ``engine/session/session.py``: the import and the construction;
* ``engine/memory``: what ``plan.py`` does with ``CodedWeights``, and the item "scales of codes" in ``zero_states.py``;
* ``model/zero/gather.py``: the import from ``as_bytes.py``, the call of ``release_decoded``, and in place of
  ``gather_as_they_are(small)`` DeepSpeed's own ``small[0].all_gather_coalesced(small)``.
"""

from model.coded.weights import NONE_CODED, can_be_coded, gather_codes

__all__ = ["NONE_CODED", "can_be_coded", "gather_codes"]
