#pragma once

#include <cstdint>
#include <vector>

namespace quern::model {

/// YaRN as transformers computes it (Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023).
struct Yarn {
  double factor = 1;  // extension of the window
  int64_t original_max_position_embeddings = 0;
  double beta_fast = 32, beta_slow = 1;  // rotations over the original window: faster ones are kept, slower ones interpolated
  bool truncate = true;                  // bounds of the ramp are whole dimensions
};

/// theta^(-2i / rotary_dim), i = 0 .. rotary_dim / 2 - 1, computed in f32.
std::vector<float> rope_inv_freq(double theta, int64_t rotary_dim);
/// The same, blended with its interpolation.
std::vector<float> yarn_inv_freq(const Yarn& yarn, double theta, int64_t rotary_dim);
/// What YaRN multiplies cos and sin with: 0.1 mscale ln(factor) + 1, and 1 for factors up to 1.
double yarn_mscale(double factor, double mscale = 1.0);

}  // namespace quern::model
