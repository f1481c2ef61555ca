#include "support/reference_checkpoint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/float_convert.h"
#include "base/hash.h"
#include "base/json.h"
#include "base/shape.h"

namespace quern::testing {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian, and so are the machines we serve on");

constexpr int kMaxInteger = 127;  // hash integers lie in [-127, 127]
constexpr int64_t kBlock = 128;

/// The weight of a hash integer: (floor(x / 2^step_log2) + offset) / denominator, exact in bf16.
struct Affine {
  int offset = 0;
  int denominator = 1;
  int step_log2 = 0;
  constexpr float operator()(int x) const { return static_cast<float>((x >> step_log2) + offset) / static_cast<float>(denominator); }
};

struct Geometry {
  int64_t hidden, intermediate, layers;
  int64_t heads, kv_heads, head_dim;
  int64_t gdn_key_heads, gdn_value_heads, gdn_head_dim;
  int64_t vocab;
  Affine lm_head, qk_norm, a_log;
};

constexpr Geometry kTiny{.hidden = 160, .intermediate = 288, .layers = 4,
                         .heads = 4, .kv_heads = 2, .head_dim = 32,
                         .gdn_key_heads = 2, .gdn_value_heads = 6, .gdn_head_dim = 16,
                         .vocab = 320,
                         .lm_head = {0, 1024}, .qk_norm = {0, 512}, .a_log = {0, 64}};

constexpr Geometry kSecond{.hidden = 256, .intermediate = 768, .layers = 8,
                           .heads = 6, .kv_heads = 1, .head_dim = 256,
                           .gdn_key_heads = 2, .gdn_value_heads = 6, .gdn_head_dim = 128,
                           .vocab = 8192,
                           .lm_head = {0, 2048}, .qk_norm = {128, 256}, .a_log = {-128, 64}};

struct Recipe {
  Shape shape;
  Affine affine;
  bool quantised = false;  // in block FP8
};
using Recipes = std::map<std::string, Recipe>;  // sorted by name, as the file is

class RecipeBook {
 public:
  explicit RecipeBook(const Geometry& geometry) : g_(geometry) {
    constexpr std::string_view kText = "model.language_model.";
    add("lm_head.weight", {g_.vocab, g_.hidden}, g_.lm_head);
    add(fmt::format("{}embed_tokens.weight", kText), {g_.vocab, g_.hidden}, {0, 128});
    norm(fmt::format("{}norm.weight", kText));
    for (int64_t i = 0; i < g_.layers; ++i) layer(fmt::format("{}layers.{}.", kText, i), i % 4 == 3);
    linear("mtp.fc.weight", g_.hidden, 2 * g_.hidden, /*quantised=*/false);
    for (const char* name : {"mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}) norm(name);
    layer("mtp.layers.0.", /*full_attention=*/true);
  }
  Recipes take() && { return std::move(recipes_); }

 private:
  void add(std::string name, Shape shape, Affine affine) { recipes_.emplace(std::move(name), Recipe{shape, affine}); }
  void linear(std::string name, int64_t rows, int64_t columns, bool quantised = true) {
    recipes_.emplace(std::move(name), Recipe{{rows, columns}, {0, columns <= 512 ? 1024 : 2048}, quantised});
  }
  void norm(std::string name) { add(std::move(name), {g_.hidden}, {0, 512}); }

  void layer(const std::string& p, bool full_attention) {
    norm(p + "input_layernorm.weight");
    norm(p + "post_attention_layernorm.weight");
    linear(p + "mlp.gate_proj.weight", g_.intermediate, g_.hidden);
    linear(p + "mlp.up_proj.weight", g_.intermediate, g_.hidden);
    linear(p + "mlp.down_proj.weight", g_.hidden, g_.intermediate);
    if (full_attention) {
      attention(p + "self_attn.");
    } else {
      gated_delta_net(p + "linear_attn.");
    }
  }

  void attention(const std::string& p) {
    linear(p + "q_proj.weight", 2 * g_.heads * g_.head_dim, g_.hidden);
    linear(p + "k_proj.weight", g_.kv_heads * g_.head_dim, g_.hidden);
    linear(p + "v_proj.weight", g_.kv_heads * g_.head_dim, g_.hidden);
    linear(p + "o_proj.weight", g_.hidden, g_.heads * g_.head_dim);
    add(p + "q_norm.weight", {g_.head_dim}, g_.qk_norm);
    add(p + "k_norm.weight", {g_.head_dim}, g_.qk_norm);
  }

  void gated_delta_net(const std::string& p) {
    const int64_t values = g_.gdn_value_heads * g_.gdn_head_dim;
    const int64_t channels = 2 * g_.gdn_key_heads * g_.gdn_head_dim + values;
    linear(p + "in_proj_qkv.weight", channels, g_.hidden);
    linear(p + "in_proj_z.weight", values, g_.hidden);
    linear(p + "in_proj_b.weight", g_.gdn_value_heads, g_.hidden, /*quantised=*/false);
    linear(p + "in_proj_a.weight", g_.gdn_value_heads, g_.hidden, /*quantised=*/false);
    add(p + "conv1d.weight", {channels, 1, 4}, {0, 256});
    add(p + "A_log", {g_.gdn_value_heads}, g_.a_log);
    add(p + "dt_bias", {g_.gdn_value_heads}, {0, 64});
    add(p + "norm.weight", {g_.gdn_head_dim}, {128, 128, 2});
    linear(p + "out_proj.weight", g_.hidden, values);
  }

  const Geometry& g_;
  Recipes recipes_;
};

std::vector<int8_t> hash_integers(std::string_view name, int64_t count) {
  SplitMix64 random(fnv1a(name));
  std::vector<int8_t> integers(static_cast<size_t>(count));
  for (int8_t& x : integers) x = static_cast<int8_t>(static_cast<int>((random.next() >> 32) % 255) - kMaxInteger);
  return integers;
}

void append_bf16(float value, std::string& bytes) {
  const uint16_t bits = to_bf16(value).bits;
  bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
}

/// A matrix in block FP8: codes [rows, columns] and bf16 scales [ceil(rows / 128), ceil(columns / 128)].
struct QuantisedMatrix {
  std::string codes, scales;
};

QuantisedMatrix quantise(const std::vector<int8_t>& integers, const Recipe& recipe) {
  const int64_t rows = recipe.shape[0], columns = recipe.shape[1];
  QuantisedMatrix q;
  q.codes.resize(integers.size());
  for (int64_t row = 0; row < rows; row += kBlock) {
    for (int64_t column = 0; column < columns; column += kBlock) {
      const int64_t row_end = std::min(row + kBlock, rows), column_end = std::min(column + kBlock, columns);
      int largest = 0;
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t c = column; c < column_end; ++c) largest = std::max(largest, std::abs(static_cast<int>(integers[r * columns + c])));
      }
      const float scale = round_bf16(recipe.affine(largest) / kE4M3Max);
      append_bf16(scale, q.scales);
      std::array<char, 2 * kMaxInteger + 1> code_of;  // a block has no more than 255 different weights
      for (int x = -kMaxInteger; x <= kMaxInteger; ++x) code_of[x + kMaxInteger] = static_cast<char>(e4m3_encode(recipe.affine(x) / scale));
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t c = column; c < column_end; ++c) q.codes[r * columns + c] = code_of[integers[r * columns + c] + kMaxInteger];
      }
    }
  }
  return q;
}

std::string make_safetensors(const Recipes& recipes, Scheme scheme) {
  Json header = Json::object();
  std::string data;
  const auto append = [&](const std::string& name, std::string_view dtype, const Shape& shape, std::string_view bytes) {
    Json extents = Json::array();
    for (const int64_t extent : shape.extents()) extents.push_back(extent);
    header[name] = Json{{"dtype", dtype}, {"shape", std::move(extents)}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
    data += bytes;
  };
  for (const auto& [name, recipe] : recipes) {
    const std::vector<int8_t> integers = hash_integers(name, recipe.shape.num_elements());
    if (recipe.quantised && scheme == Scheme::kFp8Block) {
      const QuantisedMatrix q = quantise(integers, recipe);
      append(name, "F8_E4M3", recipe.shape, q.codes);
      append(name + "_scale_inv", "BF16", {ceil_div(recipe.shape[0], kBlock), ceil_div(recipe.shape[1], kBlock)}, q.scales);
    } else {
      std::string bytes;
      bytes.reserve(2 * integers.size());
      for (const int8_t x : integers) append_bf16(recipe.affine(x), bytes);
      append(name, "BF16", recipe.shape, bytes);
    }
  }
  std::string text = dump_json(header);
  text.resize(static_cast<size_t>(round_up(static_cast<int64_t>(text.size()), 8)), ' ');
  const uint64_t header_bytes = text.size();
  std::string file(sizeof header_bytes, '\0');
  std::memcpy(file.data(), &header_bytes, sizeof header_bytes);
  return file + text + data;
}

Result<std::filesystem::path> write_reference(std::string_view name, const Geometry& geometry, Scheme scheme,
                                              const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return invalid_argument("{}: cannot make the folder: {}", folder.string(), error.message());
  const std::filesystem::path data = std::filesystem::path(QUERN_TEST_DATA) / name / (scheme == Scheme::kBf16 ? "bf16" : "fp8-block");
  ASSIGN_OR_RETURN(const std::string config, read_file(data / "config.json"));
  RETURN_IF_ERROR(write_file(folder / "config.json", config));
  RETURN_IF_ERROR(write_file(folder / "model.safetensors", make_safetensors(RecipeBook(geometry).take(), scheme)));
  return folder;
}

}  // namespace

Result<std::filesystem::path> tiny_reference(Scheme scheme, const std::filesystem::path& folder) {
  return write_reference("tiny-reference", kTiny, scheme, folder);
}

Result<std::filesystem::path> second_reference(Scheme scheme, const std::filesystem::path& folder) {
  return write_reference("second-reference", kSecond, scheme, folder);
}

}  // namespace quern::testing
