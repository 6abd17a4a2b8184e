"""The table of the primitives of JAX.

Each primitive is in exactly one of `ELEMENTWISE`, `MOVING`, `SENDING`,
`RUNNING` and `OTHER`; the other sets are properties of some of them. A test
fails if the installed JAX has a primitive that is in none of these sets. An
analysis handles such a primitive like one of `OTHER`, about which it knows
nothing: `shard_update`, for example, refuses an optimizer that uses it.

The table is based on JAX 0.10.2 and 0.12.0.1; names that exist in only one of
these versions are marked with it. Variants of a primitive have one name here;
see `interpreter.common_name`.
"""

# Each element of the results depends on the elements at the same position.
ELEMENTWISE = frozenset().union(
    ('add', 'add_any', 'sub', 'mul', 'mulhi', 'div', 'rem', 'neg', 'abs'),
    ('sign', 'max', 'min', 'clamp', 'ceil', 'floor', 'round', 'nextafter'),
    ('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'eq_to', 'le_to', 'lt_to'),
    ('is_finite', 'select_n', 'square', 'sqrt', 'rsqrt', 'cbrt'),
    ('integer_pow', 'pow', 'exp', 'exp2', 'expm1', 'log', 'log1p'),
    ('log2', 'one_minus_square', 'polynomial'),  # 0.12
    ('logistic', 'sin', 'cos', 'tan', 'asin', 'acos', 'atan', 'atan2'),
    ('sinh', 'cosh', 'tanh', 'asinh', 'acosh', 'atanh'),
    ('erf', 'erfc', 'erf_inv', 'lgamma', 'digamma', 'polygamma', 'zeta'),
    ('igamma', 'igamma_grad_a', 'igammac'),
    ('regularized_incomplete_beta', 'bessel_i0e', 'bessel_i1e'),
    ('real', 'imag', 'complex', 'conj'),
    ('and', 'or', 'xor', 'not', 'population_count', 'clz', 'shift_left'),
    ('shift_right_arithmetic', 'shift_right_logical'),
    ('convert_element_type', 'reduce_precision', 'stop_gradient', 'name'),
    ('copy', 'zeros_like'),
    # Casts of the varying manual axes.
    ('pvary', 'preduced', 'reduced_vary_cast', 'vary_unreduced_cast'),
)
# Copies and casts: the result has the values of the input.
COPIES = frozenset(('convert_element_type', 'copy', 'pvary', 'name'))
SUMS = frozenset(('add', 'add_any'))
# Primitives of `ELEMENTWISE` that map zeros to zeros.
KEEPS_ZEROS = COPIES | SUMS.union(
    ('sub', 'neg', 'abs', 'sign', 'square', 'sqrt', 'real', 'imag', 'conj'),
    ('complex', 'mul', 'max', 'min', 'stop_gradient'),
    ('shift_left', 'shift_right_arithmetic', 'shift_right_logical'),
)
# Primitives that repeat a value, or add and remove dimensions.
REPEATING = frozenset(('broadcast_in_dim', 'reshape', 'squeeze'))
# Primitives that move elements without any computation.
MOVING = REPEATING | frozenset(
    ('concatenate', 'stack', 'unstack', 'slice', 'split', 'rev', 'transpose'),
).union(
    ('dynamic_slice', 'dynamic_update_slice', 'gather', 'pad', 'tile'),
    ('optimization_barrier', 'reshard', 'sharding_constraint'),
    ('layout_constraint', 'with_memory_space_constraint'),
)
# Linear in all inputs; products and quotients only in the first input.
LINEAR = SUMS.union(
    ('sub', 'neg', 'mul', 'div', 'convert_element_type', 'reduce_precision'),
    ('copy', 'pvary', 'broadcast_in_dim', 'reshape', 'squeeze', 'transpose'),
    ('rev', 'slice', 'split', 'optimization_barrier'),
)

# Collectives whose result is the same on all shards, except with groups.
REPLICATED = frozenset(('all_gather', 'pbroadcast', 'pmax', 'pmin', 'psum'))
# Collectives in which each shard receives another part, or nothing.
SCATTERING = frozenset(
    ('all_to_all', 'ppermute', 'ragged_all_to_all', 'reduce_scatter')
).union(
    ('psend', 'precv'),
)
SENDING = REPLICATED | SCATTERING
# Collectives that add; the others in `SENDING` move or select values.
ADDING = frozenset(('psum', 'reduce_scatter'))

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
