#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"

namespace quern::server {

/// A listening socket, of TCP or in the file system. Closed, and its file removed, with this object. One owner.
class Listener {
 public:
  /// Port 0: any free one. Errors: a host that does not resolve, a port that is in use or not permitted.
  static Result<Listener> tcp(const std::string& host, uint16_t port);
  /// A socket file that a dead server left behind is replaced. Errors: a live server behind it, a file that is no socket, a path that is too
  /// long or not writable.
  static Result<Listener> unix_socket(const std::string& path);
  Listener(Listener&& other) noexcept;
  Listener& operator=(Listener&& other) noexcept;
  ~Listener();

  [[nodiscard]] int family() const { return family_; }  // AF_INET, AF_INET6 or AF_UNIX
  [[nodiscard]] uint16_t port() const { return port_; }  // 0 for a socket file
  /// The file descriptor, which is the caller's from here on; the socket file stays this object's.
  int release();

 private:
  Listener() = default;
  int socket_ = -1;
  int family_ = 0;
  uint16_t port_ = 0;
  std::string path_;  // of the socket file that is ours; empty: none
  uint64_t device_ = 0, inode_ = 0;  // of that file: another server may have put its own there
};

}  // namespace quern::server
