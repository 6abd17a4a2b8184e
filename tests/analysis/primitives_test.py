"""Tests of the table of primitives against the installed JAX."""

import itertools
import json
import subprocess
import sys

from absl.testing import absltest
import jax

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

# Primitives that run the jaxprs in their parameters, or a function. Calls are
# inlined, branches and loops are interpreted, and the others may run their
# jaxpr in any way.
RUNNING = frozenset().union(
    ('cond', 'scan', 'while', 'jit', 'remat2', 'shard_map', 'run_state'),
    ('custom_jvp_call', 'custom_jvp_call_jaxpr', 'custom_vjp_call'),
    ('custom_lin', 'custom_vmap_call', 'custom_partitioning', 'linear_call'),
    ('custom_linear_solve', 'call_exported', 'composite', 'eval_jaxpr'),
    ('call_hi_primitive', 'call_hi_primitive_linearized', 'remat_opt'),
    ('call', 'closed_call', 'core_map'),  # 0.10
    ('cudnn_fusion', 'ffi_call', 'pure_callback', 'io_callback', 'stage'),
    ('debug_callback', 'debug_print'),
)
# Primitives about which no analysis assumes anything, except where it names
# them: most combine elements, create values, or have effects.
OTHER = frozenset().union(
    # Reductions, sorting, and sums of products.
    ('reduce', 'reduce_sum', 'reduce_prod', 'reduce_max', 'reduce_min'),
    ('reduce_and', 'reduce_or', 'reduce_xor', 'argmax', 'argmin'),
    ('reduce_window', 'reduce_window_sum', 'reduce_window_max'),
    ('reduce_window_min', 'cumsum', 'cumprod', 'cummax', 'cummin'),
    ('cumlogsumexp', 'sort', 'top_k', 'approx_top_k'),
    ('dot_general', 'ragged_dot_general', 'conv_general_dilated', 'fft'),
    ('scaled_dot', 'scaled_matmul', 'scaled_matmul_wrapper'),
    # Writes to positions that are computed.
    ('scatter', 'scatter-add', 'scatter-sub', 'scatter-mul', 'scatter-max'),
    ('scatter-min', 'select_and_scatter', 'select_and_scatter_add'),
    ('select_and_gather_add',),
    # Linear algebra.
    ('cholesky', 'cholesky_update', 'eig', 'eigh', 'geqp3', 'geqrf'),
    ('hessenberg', 'householder_product', 'lu', 'lu_pivots_to_permutation'),
    ('ormqr', 'qr', 'schur', 'svd', 'symmetric_product', 'triangular_solve'),
    ('tridiagonal', 'tridiagonal_solve'),
    # Attention.
    ('dot_product_attention_fwd', 'dot_product_attention_fwd_wrapper'),
    ('dot_product_attention_bwd', 'dot_product_attention_bwd_wrapper'),
    ('dot_product_attention_fp8_fwd', 'dot_product_attention_fp8_fwd_wrapper'),
    ('dot_product_attention_fp8_bwd', 'dot_product_attention_fp8_bwd_wrapper'),
    # Values that differ between positions or shards, and random numbers.
    ('axis_index', 'iota', 'iota_2x32_shape', 'platform_index'),
    ('random_bits', 'random_clone', 'random_fold_in', 'random_gamma'),
    ('random_seed', 'random_split', 'random_unwrap', 'random_wrap'),
    ('philox2x32', 'philox4x32', 'threefry2x32', 'threefry4x32'),
    ('rng_bit_generator', 'rng_uniform'),
    # Casts that change sizes or representations, and shapes.
    ('bitcast_convert_type', 'broadcast_to', 'from_edtype', 'to_edtype'),
    ('dim_as_value', 'dimension_size', 'shape_assertion', 'empty', 'empty2'),
    ('device_put', 'inspect_sharding'),
    ('relayout',),  # 0.12
    # References and effects.
    ('accum_grad_in_ref', 'addupdate', 'empty_ref', 'free_ref', 'freeze'),
    ('get', 'new_ref', 'swap', 'pin', 'unpin'),
    ('box_get', 'box_set', 'new_box'),  # 0.10
    ('log_extend', 'log_read', 'new_log'),  # 0.10
    ('after_all', 'check', 'create_linear', 'create_token', 'dce_sink'),
    ('tie', 'unreachable'),
    # Results of collectives that a primitive `..._start` has started.
    ('all_gather_done', 'all_to_all_done', 'ppermute_done', 'psum_done'),
    ('reduce_scatter_done',),
    ('pbroadcast_done',),  # 0.10
)
CLASSES = {
    'ELEMENTWISE': primitives.ELEMENTWISE,
    'MOVING': primitives.MOVING,
    'SENDING': primitives.SENDING,
    'RUNNING': RUNNING,
    'OTHER': OTHER,
}
# Prints the primitives that `import jax` and `optax` register, in a process in
# which nothing else is imported.
PRINT_PRIMITIVES = """
import json, sys
import jax, jax.extend, jax.scipy, optax

names = {
    thing.name
    for name, module in list(sys.modules.items())
    if name.split('.')[0] == 'jax'
    for thing in vars(module).values()
    if isinstance(thing, jax.extend.core.Primitive)
}
print(json.dumps(sorted(names)))
"""
# Names that a version of JAX does not have.
MISSING = {
    (0, 10): {'log2', 'one_minus_square', 'polynomial', 'relayout'},
    (0, 12): {
        *('box_get', 'box_set', 'call', 'closed_call', 'core_map'),
        *('log_extend', 'log_read', 'new_box', 'new_log', 'pbroadcast_done'),
    },
}


def installed_primitives():
  """Returns the primitives of the installed JAX, by their common names."""
  printed = subprocess.run(
      [sys.executable, '-c', PRINT_PRIMITIVES],
      capture_output=True,
      text=True,
      check=True,
  ).stdout
  return set(map(interpreter.common_name, json.loads(printed)))


class PrimitivesTest(absltest.TestCase):

  def test_every_primitive_of_the_installed_jax_is_in_the_table(self):
    table = frozenset().union(*CLASSES.values())

    installed = installed_primitives()

    self.assertEmpty(
        installed - table,
        'JAX has primitives that are in no table. Add each of them to one of'
        f' {list(CLASSES)}, and to the sets of its properties.',
    )
    missing = MISSING.get(jax.__version_info__[:2], set())
    self.assertEqual(table - installed, missing)

  def test_every_primitive_is_in_one_class(self):
    for (name, some), (other, others) in itertools.combinations(
        CLASSES.items(), 2
    ):
      self.assertEmpty(some & others, f'{name} and {other}')

  def test_properties_are_of_classes_that_have_them(self):
    in_order = primitives.ELEMENTWISE | primitives.MOVING
    self.assertContainsSubset(primitives.COPIES, primitives.ELEMENTWISE)
    self.assertContainsSubset(primitives.KEEPS_ZEROS, primitives.ELEMENTWISE)
    self.assertContainsSubset(primitives.LINEAR, in_order)
    self.assertContainsSubset(primitives.ADDING, primitives.SENDING)
    self.assertEmpty(primitives.REPLICATED & primitives.SCATTERING)
