#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include "base/file.h"
#include "grammar_support.h"

namespace quern::text {
namespace {

/// Every schema of the corpus accepts, byte by byte, what jsonschema accepts and nothing that it does not.
TEST(JsonSchemaCorpus, AgreesWithTheValidator) {
  std::ifstream file(std::string(QUERN_BINARY_DIR) + "/tests/data/schemas/corpus.jsonl");
  ASSERT_TRUE(file);
  int num_schemas = 0, num_valid = 0, num_invalid = 0, num_wrong = 0;
  for (std::string line; std::getline(file, line);) {
    const Json entry = *parse_json(line, "line");
    const auto judge = TextJudge::of_schema(entry["schema"]);
    ++num_schemas;
    if (!judge) {
      ADD_FAILURE() << judge.error().message << "\n" << dump_json(entry["schema"]);
      if (++num_wrong > 20) break;
      continue;
    }
    const auto complain = [&](const Json& text, const char* what) {
      ADD_FAILURE() << dump_json(entry["schema"]) << "\n" << what << " " << text.get<std::string>() << "\nstops at byte " << judge->stops_at(text.get<std::string>());
      ++num_wrong;
    };
    for (const Json& text : entry["valid"]) {
      ++num_valid;
      if (!judge->accepts(text.get<std::string>())) complain(text, "refuses");
    }
    for (const Json& text : entry["invalid"]) {
      ++num_invalid;
      if (judge->accepts(text.get<std::string>())) complain(text, "accepts");
    }
    if (num_wrong > 20) break;
  }
  EXPECT_GE(num_schemas, 500);
  EXPECT_GE(num_valid, 2000);
  EXPECT_GE(num_invalid, 5000);
}

}  // namespace
}  // namespace quern::text
