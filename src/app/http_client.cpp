#include "app/http_client.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace quern::app {
namespace {

std::string error_text(int error) { return std::error_code(error, std::generic_category()).message(); }

std::string request_text(const HttpAddress& address, const HttpCall& call) {
  std::string text =
      fmt::format("{} {}{} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", call.method, address.prefix(), call.path, address.host());
  for (const std::string& header : call.headers) text += header + "\r\n";
  if (!call.body.empty()) text += fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n", call.body.size());
  return text + "\r\n" + call.body;
}

}  // namespace

Result<HttpAddress> HttpAddress::parse(std::string_view url) {
  std::string_view rest = url;
  if (rest.starts_with("https://")) return invalid_argument("{}: https is not supported; use http to the server itself", url);
  if (rest.starts_with("http://")) rest.remove_prefix(7);
  HttpAddress address;
  if (constexpr std::string_view kSocketFile = "http+unix:"; rest.starts_with(kSocketFile)) {
    rest.remove_prefix(kSocketFile.size());
    sockaddr_un name{};
    name.sun_family = AF_UNIX;
    if (rest.empty() || rest.size() >= sizeof name.sun_path)
      return invalid_argument("'{}' is not the path of a socket file: between 1 and {} bytes", rest, sizeof name.sun_path - 1);
    std::memcpy(name.sun_path, rest.data(), rest.size());
    address.host_ = "localhost";
    address.family_ = AF_UNIX;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&name);
    address.socket_address_.assign(bytes, bytes + sizeof name);
    return address;
  }
  const size_t slash = std::min(rest.find('/'), rest.size());
  address.host_ = rest.substr(0, slash);
  address.prefix_ = rest.substr(slash);
  while (!address.prefix_.empty() && address.prefix_.back() == '/') address.prefix_.pop_back();

  std::string name = address.host_, port = "80";
  if (const size_t bracket = name.find(']'); name.starts_with('[') && bracket != std::string::npos) {  // [::1]:8000
    if (bracket + 1 < name.size() && name[bracket + 1] == ':') port = name.substr(bracket + 2);
    name = name.substr(1, bracket - 1);
  } else if (const size_t colon = name.rfind(':'); colon != std::string::npos) {
    port = name.substr(colon + 1);
    name.resize(colon);
  }
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(name.c_str(), port.c_str(), &hints, &found); error != 0)
    return invalid_argument("'{}' is not a reachable address: {}", url, gai_strerror(error));
  address.family_ = found->ai_family;
  const auto* bytes = reinterpret_cast<const uint8_t*>(found->ai_addr);
  address.socket_address_.assign(bytes, bytes + found->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

Result<std::unique_ptr<HttpExchange>> HttpExchange::start(const HttpAddress& address, const HttpCall& call,
                                                          HttpResponseReader::OnBody on_body) {
  const int fd = socket(address.family_, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return make_error(ErrorCode::kResourceExhausted, "no socket for another request: {}", error_text(errno));
  std::unique_ptr<HttpExchange> exchange(new HttpExchange(fd, request_text(address, call), std::move(on_body)));
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const auto* target = reinterpret_cast<const sockaddr*>(address.socket_address_.data());
  if (connect(fd, target, static_cast<socklen_t>(address.socket_address_.size())) != 0 && errno != EINPROGRESS)
    return make_error(ErrorCode::kUnavailable, "{} cannot be reached: {}", address.host(), error_text(errno));
  return exchange;
}

HttpExchange::~HttpExchange() { close(fd_); }

short HttpExchange::events() const { return static_cast<short>(sent_ < outgoing_.size() ? POLLOUT | POLLIN : POLLIN); }

Result<bool> HttpExchange::advance() {
  if (!connected_) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return make_error(ErrorCode::kUnavailable, "the server cannot be reached: {}", error_text(error));
    connected_ = true;
  }
  while (sent_ < outgoing_.size()) {
    const ssize_t sent = send(fd_, outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) break;  // the server may have answered early and closed; its answer says more than our error
    sent_ += static_cast<size_t>(sent);
  }
  std::array<char, 64 << 10> buffer;
  while (!reader_.complete()) {
    const ssize_t got = recv(fd_, buffer.data(), buffer.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    if (got < 0) return make_error(ErrorCode::kUnavailable, "the connection broke: {}", error_text(errno));
    if (got == 0) {
      RETURN_IF_ERROR(reader_.finish());
      break;
    }
    RETURN_IF_ERROR(reader_.feed({buffer.data(), static_cast<size_t>(got)}));
  }
  return true;
}

std::vector<size_t> poll_exchanges(const std::vector<HttpExchange*>& exchanges, int timeout_ms) {
  std::vector<pollfd> sockets;
  std::vector<size_t> indices;
  for (size_t i = 0; i < exchanges.size(); ++i) {
    if (exchanges[i] == nullptr) continue;
    sockets.push_back({exchanges[i]->fd(), exchanges[i]->events(), 0});
    indices.push_back(i);
  }
  poll(sockets.data(), sockets.size(), timeout_ms);
  std::vector<size_t> ready;
  for (size_t i = 0; i < sockets.size(); ++i) {
    if (sockets[i].revents != 0) ready.push_back(indices[i]);
  }
  return ready;
}

Result<HttpReply> http_call(const HttpAddress& address, const HttpCall& call) {
  HttpReply reply;
  ASSIGN_OR_RETURN(const std::unique_ptr<HttpExchange> exchange,
                   HttpExchange::start(address, call, [&](std::string_view bytes) { reply.body += bytes; }));
  for (bool complete = false; !complete;) {
    poll_exchanges({exchange.get()}, -1);
    ASSIGN_OR_RETURN(complete, exchange->advance());
  }
  reply.status = exchange->response().status();
  return reply;
}

}  // namespace quern::app
