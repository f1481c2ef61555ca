#include "architecture/include_walls.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/file.h"
#include "support/test_support.h"

namespace quern::testing {
namespace {

std::vector<std::filesystem::path> source_files() {
  const std::filesystem::path src = std::filesystem::path(QUERN_SOURCE_DIR) / "src";
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(src)) {
    const std::string extension = entry.path().extension().string();
    if (extension == ".h" || extension == ".cpp" || extension == ".cu" || extension == ".cuh" || extension == ".cl")
      files.push_back(entry.path().lexically_relative(src));
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(IncludeWalls, NoFileLooksUphill) {
  const std::vector<std::filesystem::path> files = source_files();
  ASSERT_GT(files.size(), 50u) << "the source tree was not found";
  for (const std::filesystem::path& file : files) {
    const Result<std::string> text = read_file(std::filesystem::path(QUERN_SOURCE_DIR) / "src" / file);
    ASSERT_OK(text);
    const std::optional<std::string> breach = first_breach(file.generic_string(), *text);
    ASSERT_FALSE(breach.has_value()) << *breach;
  }
}

TEST(IncludeWalls, EveryRoomOfTheTableExistsAndEveryFolderIsARoom) {
  for (const auto& [room, neighbours] : room_neighbours()) {
    EXPECT_TRUE(std::filesystem::is_directory(std::filesystem::path(QUERN_SOURCE_DIR) / "src" / room)) << room;
    for (const std::string& neighbour : neighbours) EXPECT_TRUE(room_neighbours().contains(neighbour)) << neighbour;
  }
  for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(QUERN_SOURCE_DIR) / "src")) {
    if (!entry.is_directory()) continue;
    EXPECT_TRUE(room_neighbours().contains(entry.path().filename().string())) << entry.path();
  }
}

TEST(IncludeWalls, NamesFileLineAndWhatTheRoomMaySee) {
  EXPECT_EQ(first_breach("engine/scheduler.cpp", "#include \"engine/scheduler.h\"\n\n#include <vector>\n#include \"text/tokenizer.h\"\n"),
            "src/engine/scheduler.cpp:4 includes text/tokenizer.h; engine may see base, worker");
}

TEST(IncludeWalls, CatchesEveryKindOfBreach) {
  const auto breach = [](std::string_view path, std::string_view include) {
    return first_breach(path, "#include \"" + std::string(include) + "\"\n").has_value();
  };
  EXPECT_TRUE(breach("app/serve.cpp", "model/config.h"));
  EXPECT_TRUE(breach("app/serve.cpp", "backends/platforms.h"));
  EXPECT_TRUE(breach("model/layers.cpp", "backends/platforms.h"));
  EXPECT_TRUE(breach("backends/cpu/embed.cpp", "model/config.h"));
  EXPECT_TRUE(breach("backends/cpu/embed.cpp", "backends/cuda/embed.h"));
  EXPECT_TRUE(breach("worker/runner.cpp", "backends/cpu/thread_pool.h"));
  EXPECT_TRUE(breach("weights/loader.cpp", "worker/options.h"));
  EXPECT_TRUE(breach("ops/tensor.h", "model/config.h"));
  EXPECT_TRUE(breach("base/json.h", "ops/tensor.h"));
  EXPECT_TRUE(breach("text/bpe.cpp", "engine/request.h"));
  EXPECT_TRUE(breach("server/chat.cpp", "worker/step.h"));
  EXPECT_TRUE(breach("attic/x.cpp", "base/log.h"));
  EXPECT_TRUE(breach("engine/scheduler.cpp", "scheduler.h"));
}

TEST(IncludeWalls, SeesIncludesWithBlanksAndIgnoresOtherLines) {
  EXPECT_TRUE(first_breach("ops/tensor.h", "  #  include\t\"model/config.h\"").has_value());
  EXPECT_FALSE(
      first_breach("ops/tensor.h", "// model/config.h has the shapes\n#include <model/config.h>\nconst char* text = \"model/config.h\";\n")
          .has_value());
}

TEST(IncludeWalls, AllowsWhatTheTableAllows) {
  EXPECT_FALSE(first_breach("worker/plan.cpp", "#include \"backends/platforms.h\"\n#include \"model/config.h\"\n#include \"base/log.h\"\n")
                   .has_value());
  EXPECT_FALSE(
      first_breach("backends/platforms.cpp", "#include \"backends/cpu/kernel_table.h\"\n#include \"backends/cuda/kernel_table.h\"\n")
          .has_value());
  EXPECT_FALSE(first_breach("backends/cpu/embed.cpp", "#include \"backends/cpu/thread_pool.h\"\n#include \"ops/embed.h\"\n").has_value());
  EXPECT_FALSE(first_breach("app/serve.cpp", "#include \"server/server.h\"\n#include \"worker/plan.h\"\n").has_value());
}

}  // namespace
}  // namespace quern::testing
