#include "server/access_log.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

using quern::testing::TemporaryFolder;

HttpExchange exchange() {
  HttpExchange result;
  result.method = "POST";
  result.path = "/v1/chat/completions";
  result.client = "127.0.0.1:50000";
  result.status = 200;
  result.seconds = 1.5;
  result.bytes_received = 10;
  result.bytes_sent = 1000;
  auto facts = std::make_shared<RequestFacts>();
  facts->request_id = "chatcmpl-1";
  facts->key_idx = 2;
  facts->generated = true;
  facts->prompt_tokens = 7;
  facts->cached_tokens = 4;
  facts->completion_tokens = 5;
  facts->first_token_seconds = 0.25;
  facts->trace_id = "0af7651916cd43dd8448eb211c80319c";
  facts->span_id = "b7ad6b7169203331";
  result.facts = facts;
  return result;
}

TEST(AccessLog, ALineIsAnObjectWithEverythingThatIsKnown) {
  EXPECT_EQ(Json::parse(access_line(exchange(), "2026-11-30T12:00:00.123Z")), Json::parse(R"({
    "time": "2026-11-30T12:00:00.123Z", "client": "127.0.0.1:50000", "method": "POST", "path": "/v1/chat/completions", "status": 200,
    "outcome": "complete", "ms": 1500.0, "bytes_in": 10, "bytes": 1000, "request_id": "chatcmpl-1", "key": 2, "prompt_tokens": 7,
    "cached_tokens": 4, "completion_tokens": 5, "ttft_ms": 250.0, "trace_id": "0af7651916cd43dd8448eb211c80319c",
    "span_id": "b7ad6b7169203331"})"));
  HttpExchange unreadable;
  unreadable.status = 400;
  EXPECT_EQ(Json::parse(access_line(unreadable, "t")),
            Json::parse(R"({"time": "t", "status": 400, "outcome": "complete", "ms": 0.0, "bytes_in": 0, "bytes": 0})"));
}

TEST(AccessLog, AnyPathStaysOneLineOfJson) {
  for (const std::string& path : {std::string("/\n{\"forged\":1}"), std::string("/\xff\xfe\"\\"), std::string("/") + std::string(100'000, 'a'),
                                  std::string("/\0\x1b[31m", 7)}) {
    HttpExchange request = exchange();
    request.path = path;
    request.method = std::string(1000, 'M');
    const std::string line = access_line(request, "t");
    EXPECT_EQ(line.find('\n'), std::string::npos);
    EXPECT_EQ(line.find('\x1b'), std::string::npos);
    EXPECT_LT(line.size(), 2000U);
    EXPECT_TRUE(Json::accept(line)) << line;
  }
}

TEST(AccessLog, WritesAllLinesBeforeItEnds) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "access.log";
  constexpr int kNumLines = 1000;
  for (int part = 0; part < 2; ++part) {  // the second appends
    const auto log = AccessLog::open({path.string(), {}});
    ASSERT_OK(log);
    for (int i = 0; i < kNumLines; ++i) (*log)->write(exchange());
  }
  const std::string text = *read_file(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2 * kNumLines);
}

TEST(AccessLog, LeavesOutTheNamedPathsUnlessTheyFail) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "access.log";
  {
    const auto log = AccessLog::open({path.string(), {"/health"}});
    ASSERT_OK(log);
    HttpExchange probe = exchange();
    probe.path = "/health";
    (*log)->write(probe);
    probe.status = 503;
    (*log)->write(probe);
  }
  const std::string text = *read_file(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  EXPECT_THAT(text, ::testing::HasSubstr("503"));
}

TEST(AccessLog, GoesOnInANewFileAfterARotation) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "access.log";
  {
    const auto log = AccessLog::open({path.string(), {}});
    ASSERT_OK(log);
    (*log)->write(exchange());
    while (read_file(path)->empty()) {
    }
    std::filesystem::rename(path, folder.path() / "access.log.1");
    (*log)->reopen();
    (*log)->write(exchange());
  }
  for (const char* name : {"access.log", "access.log.1"}) {
    const std::string text = *read_file(folder.path() / name);
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << name;
  }
}

TEST(AccessLog, APipeThatNobodyReadsHoldsUpNobody) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_GE(reader, 0);
  {
    const auto log = AccessLog::open({path.string(), {}});
    ASSERT_OK(log);
    for (int i = 0; i < 20'000; ++i) (*log)->write(exchange());
    EXPECT_GT((*log)->num_dropped(), 10'000U);
  }
  {
    const auto log = AccessLog::open({path.string(), {}});
    ASSERT_OK(log);
    ::close(reader);  // and whoever read it may end
    (*log)->write(exchange());
    while ((*log)->num_dropped() == 0) {
    }
  }
}

TEST(AccessLog, SaysThatItCannotWriteThere) {
  const auto log = AccessLog::open({"/no/such/folder/access.log", {}});
  ASSERT_FALSE(log);
  EXPECT_THAT(log.error().message, ::testing::HasSubstr("--access-log /no/such/folder/access.log"));
}

}  // namespace
}  // namespace quern::server
