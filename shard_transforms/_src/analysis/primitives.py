"""The primitives of JAX that the readers of programs know, by what they do.

Read from JAX 0.10.2 and 0.12.0.1: a name that only one of them has is followed
by its version. A test compares the tables with the primitives of the installed
JAX. Variants of a primitive have one name here; see `interpreter.common_name`.
"""

# Each element of the results comes from the elements at the same place.
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
    # Casts of the varying type.
    ('pvary', 'preduced', 'reduced_vary_cast', 'vary_unreduced_cast'),
)
# Copies and casts: the result has the numbers of the input.
COPIES = frozenset(('convert_element_type', 'copy', 'pvary', 'name'))
SUMS = frozenset(('add', 'add_any'))
# Those of `ELEMENTWISE` that map zeros to zeros.
KEEPS_ZEROS = COPIES | SUMS.union(
    ('sub', 'neg', 'abs', 'sign', 'square', 'sqrt', 'real', 'imag', 'conj'),
    ('complex', 'mul', 'max', 'min', 'stop_gradient'),
    ('shift_left', 'shift_right_arithmetic', 'shift_right_logical'),
)
# Repeats one number, or changes the shape around it.
REPEATING = frozenset(('broadcast_in_dim', 'reshape', 'squeeze'))
# Copies elements to other places, and computes nothing from them.
MOVING = REPEATING | frozenset(
    ('concatenate', 'stack', 'unstack', 'slice', 'split', 'rev', 'transpose'),
).union(
    ('dynamic_slice', 'dynamic_update_slice', 'gather', 'pad', 'tile'),
    ('optimization_barrier', 'reshard', 'sharding_constraint'),
)
# Linear in its inputs: products and quotients in the first of them alone.
LINEAR = SUMS.union(
    ('sub', 'neg', 'mul', 'div', 'convert_element_type', 'reduce_precision'),
    ('copy', 'pvary', 'broadcast_in_dim', 'reshape', 'squeeze', 'transpose'),
    ('rev', 'slice', 'split', 'optimization_barrier'),
)

# Collectives whose result is the same on all shards, except with groups.
REPLICATED = frozenset(('all_gather', 'pbroadcast', 'pmax', 'pmin', 'psum'))
# Each shard gets another part, or some shards get nothing.
SCATTERING = frozenset(
    ('all_to_all', 'ppermute', 'ragged_all_to_all', 'reduce_scatter')
)
SENDING = REPLICATED | SCATTERING
# Add up what shards bring; the others of `SENDING` move it or choose from it.
ADDING = frozenset(('psum', 'reduce_scatter'))
