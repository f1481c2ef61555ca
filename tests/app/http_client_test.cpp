#include "app/http_client.h"

#include "app/event_stream.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Reads `bytes` in two pieces cut at `cut`; the body, or the error.
Result<std::string> read_in_two(std::string_view bytes, size_t cut, bool ends) {
  std::string body;
  HttpResponseReader reader([&](std::string_view piece) { body += piece; });
  RETURN_IF_ERROR(reader.feed(bytes.substr(0, cut)));
  RETURN_IF_ERROR(reader.feed(bytes.substr(cut)));
  if (ends) RETURN_IF_ERROR(reader.finish());
  if (!reader.complete()) return make_error(ErrorCode::kInternal, "incomplete");
  return body;
}

TEST(HttpResponse, IsReadAlikeWhereverItsBytesAreCut) {
  const std::string with_length = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
  const std::string chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x=y\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n";
  const std::string to_the_end = "HTTP/1.1 200 OK\r\n\r\nhello";
  const std::string after_continue = "HTTP/1.1 100 Continue\r\n\r\n" + with_length;
  for (const std::string& text : {with_length, chunked, to_the_end, after_continue}) {
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      const Result<std::string> body = read_in_two(text, cut, text == to_the_end);
      ASSERT_OK(body);
      ASSERT_EQ(*body, "hello") << text << " cut at " << cut;
    }
  }
}

TEST(HttpResponse, KnowsStatusAndHeadersByAnySpelling) {
  HttpResponseReader reader([](std::string_view) {});
  ASSERT_OK(reader.feed("HTTP/1.1 503 Service Unavailable\r\nRETRY-After:7\r\nContent-Length: 0\r\n\r\n"));
  EXPECT_TRUE(reader.complete());
  EXPECT_EQ(reader.status(), 503);
  EXPECT_EQ(reader.header("retry-after"), "7");
  EXPECT_EQ(reader.header("x"), "");
}

TEST(HttpResponse, RefusesWhatIsNoneAndWhatEndsEarly) {
  EXPECT_FALSE(read_in_two("SSH-2.0-OpenSSH\r\n", 3, false));
  EXPECT_FALSE(read_in_two("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 0, false));
  EXPECT_FALSE(read_in_two("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", 0, false));
  EXPECT_FALSE(read_in_two("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", 0, true));
  EXPECT_FALSE(read_in_two("HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n", 0, true));
}

TEST(HttpAddress, TakesUrlsHostsAndSixthVersionAddresses) {
  EXPECT_EQ(HttpAddress::parse("http://127.0.0.1:8000/api/")->prefix(), "/api");
  EXPECT_EQ(HttpAddress::parse("127.0.0.1:8000")->host(), "127.0.0.1:8000");
  EXPECT_TRUE(HttpAddress::parse("http://[::1]:8000"));
  EXPECT_EQ(HttpAddress::parse("http+unix:/run/quern.sock")->host(), "localhost");
  EXPECT_FALSE(HttpAddress::parse("http+unix:"));
  EXPECT_FALSE(HttpAddress::parse("http+unix:/" + std::string(200, 'x')));
  EXPECT_THAT(HttpAddress::parse("https://127.0.0.1").error().message, HasSubstr("https"));
}

TEST(HttpClient, SaysThatNobodyListens) {
  const Result<HttpAddress> address = HttpAddress::parse("127.0.0.1:1");
  ASSERT_OK(address);
  EXPECT_FALSE(http_call(*address, {}));
}

TEST(EventStream, GivesTheDataOfEveryEventWhereverItsBytesAreCut) {
  const std::string text = ": comment\n\ndata: one\n\nevent: x\r\ndata:two\r\ndata: lines\r\n\r\ndata: [DONE]\n\n";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    std::vector<std::string> events;
    EventStreamReader reader([&](std::string_view data) { events.emplace_back(data); });
    reader.feed(std::string_view(text).substr(0, cut));
    reader.feed(std::string_view(text).substr(cut));
    ASSERT_THAT(events, ElementsAre("one", "two\nlines", "[DONE]")) << cut;
  }
}

}  // namespace
}  // namespace quern::app
