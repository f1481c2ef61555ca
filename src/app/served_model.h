#pragma once

#include <string>
#include <vector>

#include "app/http_client.h"

namespace quern::app {

/// The name of the model that a server serves: the first of its /v1/models. `option` is the one that would have given the name.
Result<std::string> served_model(const HttpAddress& address, const std::vector<std::string>& headers, std::string_view option);

}  // namespace quern::app
