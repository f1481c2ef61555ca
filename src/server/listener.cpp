#include "server/listener.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace quern::server {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

/// Whether somebody accepts connections behind this socket file.
bool is_alive(const sockaddr_un& address) {
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) return true;  // nothing is known: leave it alone
  const bool refused = ::connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
  ::close(probe);
  return !refused;
}

}  // namespace

Listener::Listener(Listener&& other) noexcept { *this = std::move(other); }

Listener& Listener::operator=(Listener&& other) noexcept {
  std::swap(socket_, other.socket_);
  std::swap(family_, other.family_);
  std::swap(port_, other.port_);
  std::swap(path_, other.path_);
  std::swap(device_, other.device_);
  std::swap(inode_, other.inode_);
  return *this;
}

Listener::~Listener() {
  if (socket_ >= 0) ::close(socket_);
  struct stat file {};
  if (!path_.empty() && ::lstat(path_.c_str(), &file) == 0 && file.st_dev == device_ && file.st_ino == inode_) ::unlink(path_.c_str());
}

int Listener::release() { return std::exchange(socket_, -1); }

Result<Listener> Listener::tcp(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failure = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (failure != 0) return invalid_argument("--host {}: not an address of this machine ({})", host, ::gai_strerror(failure));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);

  Listener listener;
  listener.family_ = found->ai_family;
  listener.socket_ = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  bool ok = listener.socket_ >= 0 && ::setsockopt(listener.socket_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0;
  ok = ok && ::bind(listener.socket_, found->ai_addr, found->ai_addrlen) == 0 && ::listen(listener.socket_, SOMAXCONN) == 0;
  if (!ok && errno == EADDRINUSE) {
    return invalid_argument("cannot listen on {}:{}: the port is in use by another program; choose another with --port", host, port);
  }
  if (!ok && errno == EADDRNOTAVAIL) return invalid_argument("--host {}: not an address of this machine", host);
  if (!ok) return invalid_argument("cannot listen on {}:{}: {}", host, port, reason(errno));
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(listener.socket_, reinterpret_cast<sockaddr*>(&address), &size);
  listener.port_ = ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                                       : reinterpret_cast<const sockaddr_in&>(address).sin_port);
  return Result<Listener>(std::move(listener));
}

Result<Listener> Listener::unix_socket(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return invalid_argument("--uds {}: the path of a socket has 1 to {} bytes, this one has {}", path, sizeof address.sun_path - 1, path.size());
  }
  std::memcpy(address.sun_path, path.c_str(), path.size());
  struct stat file {};
  if (::lstat(path.c_str(), &file) == 0) {
    if (!S_ISSOCK(file.st_mode)) return invalid_argument("--uds {}: there is a file of this name, and it is not a socket", path);
    if (is_alive(address)) return invalid_argument("--uds {}: another server listens there", path);
    ::unlink(path.c_str());  // left behind by a server that did not end by itself
  }
  Listener listener;
  listener.family_ = AF_UNIX;
  listener.socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener.socket_ < 0 || ::bind(listener.socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return invalid_argument("--uds {}: cannot make the socket: {}", path, reason(errno));
  }
  if (::lstat(path.c_str(), &file) == 0) {
    listener.path_ = path;
    listener.device_ = file.st_dev;
    listener.inode_ = file.st_ino;
  }
  if (::listen(listener.socket_, SOMAXCONN) != 0) return invalid_argument("--uds {}: cannot listen: {}", path, reason(errno));
  return Result<Listener>(std::move(listener));
}

}  // namespace quern::server
