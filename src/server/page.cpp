#include "server/page.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/check.h"

namespace quern::server {
namespace {

/// Scripts, styles and requests of this server and of nobody else; and no text becomes HTML: with Trusted Types, assigning innerHTML fails.
constexpr std::string_view kContentSecurityPolicy =
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

std::string_view content_type(std::string_view path) {
  if (path.ends_with(".html")) return "text/html; charset=utf-8";
  if (path.ends_with(".css")) return "text/css; charset=utf-8";
  if (path.ends_with(".js")) return "text/javascript; charset=utf-8";
  if (path.ends_with(".svg")) return "image/svg+xml";
  CHECK_UNREACHABLE();
}

/// Whether an If-None-Match header, a list of tags that may be weak, names this one.
bool names_tag(std::string_view header, std::string_view tag) { return header == "*" || header.find(tag) != std::string_view::npos; }

}  // namespace

std::optional<HttpResponse> page_response(const HttpRequest& request) {
  constexpr std::string_view kFolder = "/page/";
  std::string_view name;
  if (request.path == "/") {
    name = "index.html";
  } else if (request.path.starts_with(kFolder)) {
    name = std::string_view(request.path).substr(kFolder.size());
  } else {
    return std::nullopt;
  }
  const auto file = std::ranges::find(page_files, name, &EmbeddedFile::path);
  if (file == page_files.end()) return std::nullopt;
  const std::string tag = fmt::format("\"{}\"", file->hash);
  HttpResponse response;
  response.content_type = content_type(file->path);
  response.headers = {{"ETag", tag},
                      {"Cache-Control", "no-cache"},  // may be kept, but asked about each time: a new quern is a new page
                      {"Content-Security-Policy", std::string(kContentSecurityPolicy)},
                      {"X-Content-Type-Options", "nosniff"},
                      {"Referrer-Policy", "no-referrer"}};
  if (names_tag(request.header("If-None-Match"), tag)) {
    response.status = 304;
  } else {
    response.body = file->bytes;
  }
  return response;
}

}  // namespace quern::server
