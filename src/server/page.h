#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "server/http_message.h"

// The chat page: a few files of src/server/page/, in the program as bytes. They know no secret and need no key; what they ask the API
// for does.

namespace quern::server {

struct EmbeddedFile {
  std::string_view path;  // below src/server/page/
  std::string_view hash;  // of the bytes; names their version
  std::string_view bytes;
};

/// All of the page (written at build time by cmake/embed.cmake).
extern const std::span<const EmbeddedFile> page_files;

/// index.html at "/", the other files below "/page/". Nothing for any other path. 304 where the request knows the version; headers that
/// keep the page from loading, sending or being framed anywhere else.
std::optional<HttpResponse> page_response(const HttpRequest& request);

}  // namespace quern::server
