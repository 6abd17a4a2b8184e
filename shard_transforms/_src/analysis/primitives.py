"""The primitives of JAX about which analyses make assumptions.

A primitive is in at most one of `ELEMENTWISE`, `MOVING` and `SENDING`; the
other sets are properties of some of them. About any other primitive, an
analysis knows nothing: `shard_update`, for example, refuses an optimizer that
uses it. A test has the table of these primitives, and fails if the installed
JAX has a primitive that is in neither table.

The tables are based on JAX 0.10.2 and 0.12.0.1; names that exist in only one of
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
