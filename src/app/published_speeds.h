#pragma once

#include <span>
#include <string_view>

#include "worker/plan.h"

namespace quern::app {

/// A speed that somebody measured with another program and published, of Qwen3.6-27B (or a sibling of its shapes) on cards that `plan` models.
struct PublishedSpeed {
  std::string_view card;  // as --device names it
  int num_cards = 1;
  double tokens_per_second = 0;
  std::string_view what, source;
};
std::span<const PublishedSpeed> published_speeds();

/// Whether the model has the shapes that the table is of.
bool has_published_shapes(const model::ModelConfig& config);

}  // namespace quern::app
