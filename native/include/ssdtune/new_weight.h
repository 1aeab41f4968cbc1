// The arithmetic of AdamW on one element, or on a register of them. Included once for each
// instruction set, in its namespace, after `root`; so it has no include guard.

template <typename Floats>
SSDTUNE_INLINE Floats new_weight(Floats weight, Floats grad, Floats& exp_avg, Floats& exp_avg_sq,
                                 const AdamScalars& s) {
  const Floats g = grad * s.grad_scale;
  const Floats decayed = weight * s.decay;
  const Floats m = exp_avg + (g - exp_avg) * s.one_minus_beta1;
  const Floats v = exp_avg_sq * s.beta2 + (s.one_minus_beta2 * g) * g;
  exp_avg = m;
  exp_avg_sq = v;
  const Floats denominator = root(v) * s.inverse_root + s.eps;
  return decayed - (s.step_size * m) / denominator;
}
