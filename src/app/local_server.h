#pragma once

#include <memory>
#include <string>

#include "app/model_options.h"
#include "base/result.h"

namespace quern::app {

/// A model served to this process alone: on a free port of the loopback interface, behind a key that nobody else knows. What talks to it
/// takes the same path as any client. Ends what runs when destroyed.
class LocalServer {
 public:
  virtual ~LocalServer() = default;
  [[nodiscard]] virtual std::string url() const = 0;
  [[nodiscard]] virtual std::string api_key() const = 0;
};

/// Loads the model and waits until it answers. In a build without text/ and server/: an error that says so.
Result<std::unique_ptr<LocalServer>> start_local_server(const ModelOptions& options);

}  // namespace quern::app
