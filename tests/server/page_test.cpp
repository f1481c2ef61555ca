#include "server/page.h"

#include <fstream>

#include "api_fixture.h"

namespace quern::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Page : public ApiTest {};

TEST_F(Page, IsServedWithAllItsFilesAlsoWhileTheModelLoadsAndWithoutAKey) {
  ServerOptions options;
  options.api.api_keys = {"secret"};
  start(options, false);
  const ClientResponse index = get("/");
  EXPECT_EQ(index.status, 200);
  EXPECT_EQ(index.header("Content-Type"), "text/html; charset=utf-8");
  EXPECT_THAT(index.body, HasSubstr("<!doctype html>"));
  ASSERT_GE(page_files.size(), 8U);
  for (const EmbeddedFile& file : page_files) {
    const ClientResponse response = get("/page/" + std::string(file.path));
    EXPECT_EQ(response.status, 200) << file.path;
    EXPECT_EQ(response.body, file.bytes) << file.path;
    EXPECT_EQ(response.header("X-Content-Type-Options"), "nosniff") << file.path;
    EXPECT_THAT(response.header("Content-Security-Policy"), HasSubstr("default-src 'none'")) << file.path;
  }
}

TEST_F(Page, IsTheFilesOfTheSourceTreeAndNamesNoOtherHost) {
  const std::filesystem::path folder = std::filesystem::path(QUERN_SOURCE_DIR) / "src/server/page";
  size_t num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++num_files;
    const std::string name = entry.path().filename();
    const auto file = std::ranges::find(page_files, name, &EmbeddedFile::path);
    ASSERT_NE(file, page_files.end()) << name << " is not embedded";
    std::ifstream stream(entry.path(), std::ios::binary);
    EXPECT_EQ(file->bytes, std::string(std::istreambuf_iterator<char>(stream), {})) << name;
    if (!name.ends_with(".svg")) {  // which names its XML namespace
      EXPECT_THAT(std::string(file->bytes), Not(HasSubstr("://"))) << name;
    }
    for (const char* sink :
         {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser", "srcdoc"})
      EXPECT_THAT(std::string(file->bytes), Not(HasSubstr(sink))) << name;
  }
  EXPECT_EQ(num_files, page_files.size());
}

TEST_F(Page, IsSentOnceForEachVersion) {
  start();
  for (const char* path : {"/", "/page/main.js"}) {
    const ClientResponse first = get(path);
    const std::string tag(first.header("ETag"));
    ASSERT_EQ(tag.size(), 18U);
    EXPECT_EQ(first.header("Cache-Control"), "no-cache");
    for (const std::string& known : {tag, "W/" + tag, "\"other\", " + tag, std::string("*")}) {
      const ClientResponse again = get(path, "If-None-Match: " + known + "\r\n");
      EXPECT_EQ(again.status, 304) << known;
      EXPECT_EQ(again.body, "");
      EXPECT_EQ(again.header("ETag"), tag);
      EXPECT_EQ(again.header("Content-Length"), "");
    }
    EXPECT_EQ(get(path, "If-None-Match: \"other\"\r\n").status, 200);
  }
  EXPECT_NE(get("/").header("ETag"), get("/page/main.js").header("ETag"));
}

TEST_F(Page, OffersNothingBesideItsFiles) {
  start();
  for (const char* path :
       {"/page/", "/page", "/page/nothing.js", "/page/../page/main.js", "/page/%2e%2e/main.js", "//", "/page//main.js", "/index.html"})
    EXPECT_EQ(get(path).status, 404) << path;
  EXPECT_EQ(value(HttpClient::fetch(port(), "POST", "/")).status, 405);
  const ClientResponse head = value(HttpClient::fetch(port(), "HEAD", "/"));
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
}

TEST_F(Page, CanBeSwitchedOff) {
  ServerOptions options;
  options.api.page = false;
  start(options);
  for (const char* path : {"/", "/page/main.js"}) EXPECT_EQ(get(path).status, 404) << path;
  EXPECT_EQ(chat().status, 200);
}

TEST_F(Page, ReadyTellsHowFarLoadingIs) {
  start({}, false);
  Json state = get("/ready").json();
  EXPECT_EQ(state["status"], "loading");
  EXPECT_EQ(state["phase"], "starting");
  EXPECT_EQ(state["fraction"], 0);
  server_->set_loading({.phase = "loading_weights", .fraction = 0.25});
  const ClientResponse response = get("/ready");
  EXPECT_EQ(response.status, 503);
  EXPECT_EQ(response.header("Retry-After"), "1");
  state = response.json();
  EXPECT_EQ(state["phase"], "loading_weights");
  EXPECT_EQ(state["fraction"], 0.25);
  EXPECT_EQ(state["error"]["message"], "the model is still loading");
  server_->set_ready(context_);
  EXPECT_EQ(get("/ready").json(), Json::parse(R"({"status": "ready"})"));
}

}  // namespace
}  // namespace quern::server
