// The tensor lists of the released 27B checkpoints, laid out on disk as files with real headers and holes where the weights would be.

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "base/file.h"
#include "model/config.h"
#include "support/test_support.h"
#include "weights/source.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct Row {
  std::string name, dtype, shape, file;
  uint64_t bytes = 0;
};

std::vector<Row> read_list(const char* name, bool with_files) {
  std::ifstream file(quern::testing::data_path("qwen3.6-27b") / name);
  std::string line;
  std::getline(file, line);
  std::vector<Row> rows;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    Row row;
    fields >> row.name >> row.dtype >> row.shape;
    if (with_files) fields >> row.file;
    fields >> row.bytes;
    rows.push_back(std::move(row));
  }
  return rows;
}

/// Writes headers; the data are holes in a sparse file.
void lay_out(const std::vector<Row>& rows, const std::filesystem::path& folder) {
  std::map<std::string, std::vector<const Row*>> files;
  Json weight_map = Json::object();
  for (const Row& row : rows) {
    const std::string file = row.file.empty() ? "model-00001-of-00001.safetensors" : row.file;
    files[file].push_back(&row);
    weight_map[row.name] = file;
  }
  for (const auto& [name, content] : files) {
    std::string header = "{";
    uint64_t offset = 0;
    for (const Row* row : content) {
      std::string shape = row->shape;
      std::replace(shape.begin(), shape.end(), 'x', ',');
      header += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", offset == 0 ? "" : ",", row->name, row->dtype,
                            shape, offset, offset + row->bytes);
      offset += row->bytes;
    }
    header += "}";
    const uint64_t size = header.size();
    std::string start(sizeof size, '\0');
    std::memcpy(start.data(), &size, sizeof size);
    ASSERT_OK(write_file(folder / name, start + header));
    std::filesystem::resize_file(folder / name, start.size() + header.size() + offset);
  }
  ASSERT_OK(write_file(folder / "model.safetensors.index.json", Json{{"metadata", Json::object()}, {"weight_map", weight_map}}.dump()));
}

struct Released {
  const char *list, *config;
  bool with_files;
  uint64_t total_bytes;
  size_t fp8_linears;
};

TEST(ReleasedLists, AreAccountedForToTheLastByte) {
  for (const Released& r : {Released{"tensors.bf16.tsv", "config.json", false, 55'562'855'904, 0},
                            Released{"tensors.fp8.tsv", "config.fp8.json", true, 30'866'663'264, 407}}) {
    SCOPED_TRACE(r.list);
    const std::vector<Row> rows = read_list(r.list, r.with_files);
    const quern::testing::TemporaryFolder folder;
    lay_out(rows, folder.path());
    ASSERT_OK(write_file(folder.path() / "config.json", *read_file(quern::testing::data_path("qwen3.6-27b") / r.config)));
    const auto config = model::load_config(folder.path());
    ASSERT_OK(config);
    LoadOptions options;
    options.strict = true;
    const auto source = open_weights(folder.path(), *config, options);
    ASSERT_OK(source);
    const Inventory& inventory = (*source)->inventory();

    EXPECT_TRUE(inventory.has_mtp);
    EXPECT_EQ(inventory.ignored.size(), 333u);
    EXPECT_THAT(inventory.ignored, Each(HasSubstr("model.visual.")));
    EXPECT_THAT(inventory.unknown, IsEmpty());
    EXPECT_THAT(inventory.notes, IsEmpty());
    uint64_t total = 0, vision = 0;
    for (const Row& row : rows) {
      total += row.bytes;
      if (row.name.starts_with("model.visual.")) vision += row.bytes;
    }
    EXPECT_EQ(total, r.total_bytes);
    EXPECT_EQ(inventory.stored_bytes, total - vision);

    size_t fp8 = 0;
    for (const auto& [name, linear] : inventory.linears) fp8 += linear.scheme == WeightScheme::kFp8Block;
    EXPECT_EQ(fp8, r.fp8_linears);

    const auto planned = inventory_from_config(*config, options);
    ASSERT_OK(planned);
    EXPECT_EQ(planned->stored_bytes, inventory.stored_bytes);
    EXPECT_EQ(planned->linears, inventory.linears);
    EXPECT_EQ(planned->vectors, inventory.vectors);
  }
}

TEST(ReleasedLists, RuntimeQuantizationIsANoteOnFp8AndAPlanOnBf16) {
  LoadOptions options;
  options.quantize_fp8 = true;
  for (const bool fp8 : {false, true}) {
    const quern::testing::TemporaryFolder folder;
    lay_out(read_list(fp8 ? "tensors.fp8.tsv" : "tensors.bf16.tsv", fp8), folder.path());
    const auto json = read_json_file(quern::testing::data_path("qwen3.6-27b") / (fp8 ? "config.fp8.json" : "config.json"));
    const auto config = model::parse_config(*json, "27B");
    const auto source = open_weights(folder.path(), *config, options);
    ASSERT_OK(source);
    const Inventory& inventory = (*source)->inventory();
    EXPECT_EQ(inventory.linears.at("layers.0.mlp.up_proj.weight").scheme, fp8 ? WeightScheme::kFp8Block : WeightScheme::kFp8Channel);
    EXPECT_EQ(inventory.linears.at("lm_head.weight").scheme, WeightScheme::kBF16);
    if (fp8) {
      EXPECT_THAT(inventory.notes, ::testing::Contains(HasSubstr("--quantization fp8 has no effect: the checkpoint is FP8 already")));
    }
  }
}

}  // namespace
}  // namespace quern::weights
