#include "weights/checkpoint.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/json.h"

namespace quern::weights {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kMtpName = "mtp.safetensors";

/// Shards lie inside the model directory: a relative path without "..". Links are followed, download caches are made of them.
bool stays_inside(const fs::path& shard) {
  if (shard.empty() || shard.is_absolute() || shard.native().find('\\') != std::string::npos ||
      shard.native().find('\0') != std::string::npos)
    return false;
  return std::none_of(shard.begin(), shard.end(), [](const fs::path& part) { return part == ".." || part == "."; });
}

Error no_checkpoint(const fs::path& dir) {
  std::set<std::string> others;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(dir, error)) {
    const std::string extension = entry.path().extension().string();
    if (extension == ".gguf" || extension == ".bin" || extension == ".pt" || extension == ".pth" || extension == ".safetensors") {
      others.insert(entry.path().filename().string());
    }
  }
  const std::string found = others.empty() ? "no weights of any kind" : fmt::format("{}", fmt::join(others, ", "));
  return make_error(ErrorCode::kNotFound,
                    "{}: expected {} or {}, found {}; quern loads safetensors checkpoints as released on Hugging Face", dir.string(),
                    kIndexName, kSingleName, found);
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const fs::path& dir, Faults& faults) {
  Checkpoint checkpoint;
  std::error_code error;
  if (fs::exists(dir / kIndexName, error)) {
    checkpoint.follow_index(dir / kIndexName, faults);
  } else if (fs::exists(dir / kSingleName, error)) {
    checkpoint.open_file(dir / kSingleName, /*is_extra=*/false, faults);
  } else {
    return no_checkpoint(dir);
  }
  checkpoint.add_mtp_beside(dir, faults);
  return checkpoint;
}

void Checkpoint::open_file(const fs::path& path, bool is_extra, Faults& faults) {
  auto file = SafetensorsFile::open(path);
  if (!file) return faults.add(file.error());
  const SafetensorsFile& opened = files_.emplace_back(std::move(file).value());
  size_t used = 0;
  for (const auto& [name, tensor] : opened.tensors()) {
    const auto [place, is_new] = tensors_.emplace(std::string_view(name), TensorRef{&opened, &tensor, name});
    used += is_new;
    if (!is_new && !is_extra)
      faults.add("{}: in {} and in {}", name, place->second.file->path().filename().string(), path.filename().string());
  }
  if (is_extra && used != 0)
    notes_.push_back(fmt::format("{}: {} tensors are read from it, though no index names it", path.filename().string(), used));
}

void Checkpoint::follow_index(const fs::path& index, Faults& faults) {
  const auto text = read_file(index);
  if (!text) return faults.add(text.error());
  const auto json = parse_sorted_json(*text, index.string());
  if (!json) return faults.add(json.error());
  if (!json->is_object() || !json->contains("weight_map") || !(*json)["weight_map"].is_object()) {
    return faults.add("{}: expected an object \"weight_map\" from tensor names to file names", index.string());
  }
  std::map<std::string, std::vector<std::string>> shards;  // file name -> tensors
  for (const auto& [name, shard] : (*json)["weight_map"].items()) {
    if (!shard.is_string()) return faults.add("{}: weight_map: the file of {} is not a string", index.string(), name);
    shards[shard.get<std::string>()].push_back(name);
  }
  for (const auto& [shard, names] : shards) {
    if (!stays_inside(shard)) {
      faults.add("{}: weight_map: \"{}\" leaves the model directory", index.string(), shard);
      continue;
    }
    const size_t faults_before = faults.size();
    open_file(index.parent_path() / shard, /*is_extra=*/false, faults);
    if (faults.size() != faults_before) continue;
    for (const std::string& name : names) {
      const auto found = tensors_.find(name);
      if (found == tensors_.end()) {
        faults.add("{}: the index says it is in {}, which does not have it", name, shard);
      }
    }
  }
}

/// Hybrid directories: the main model of one release and the MTP head of another (model-spec.md 2.5).
void Checkpoint::add_mtp_beside(const fs::path& dir, Faults& faults) {
  const fs::path path = dir / kMtpName;
  std::error_code error;
  const bool known = std::any_of(files_.begin(), files_.end(), [&](const SafetensorsFile& file) { return file.path() == path; });
  if (!known && fs::exists(path, error)) open_file(path, /*is_extra=*/true, faults);
}

}  // namespace quern::weights
