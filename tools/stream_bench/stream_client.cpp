#include "stream_client.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>

namespace quern::tools {
namespace {

struct Connection {
  int socket = -1;
  int64_t sent_at = 0;
  int32_t num_tokens = 0;
  std::string rest;  // of an event that has not arrived completely
};

/// Connected, blocking until the kernel has taken the request; reads are non-blocking.
Result<int> ask(uint16_t port, int32_t stream, int32_t num_tokens) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (socket < 0 || ::connect(socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return make_error(ErrorCode::kUnavailable, "stream {}: cannot connect: {}", stream, std::generic_category().message(errno));
  }
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  const std::string body = fmt::format(
      R"({{"messages":[{{"role":"user","content":"Tell me something that is long."}}],"stream":true,"ignore_eos":true,"return_token_ids":true,)"
      R"("seed":{},"max_tokens":{}}})",
      stream, num_tokens);
  const std::string request =
      fmt::format("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{}",
                  body.size(), body);
  if (::send(socket, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return make_error(ErrorCode::kUnavailable, "stream {}: cannot send", stream);
  }
  ::fcntl(socket, F_SETFL, O_NONBLOCK);
  return socket;
}

/// Tokens in the choice's own list of one event; the first event has the prompt's ids in a list of another name.
int32_t count_tokens(std::string_view event) {
  constexpr std::string_view kList = "\"token_ids\":[";
  int32_t count = 0;
  for (size_t at = event.find(kList); at != std::string_view::npos; at = event.find(kList, at + 1)) {
    if (at > 0 && event[at - 1] == '_') continue;
    const std::string_view list = event.substr(at + kList.size(), event.find(']', at) - at - kList.size());
    if (!list.empty()) count += 1 + static_cast<int32_t>(std::count(list.begin(), list.end(), ','));
  }
  return count;
}

}  // namespace

Result<StreamLatencies> read_streams(const StreamLoad& load, const TokenTimes& times) {
  StreamLatencies result;
  std::vector<Connection> connections(static_cast<size_t>(load.num_streams));
  const int poller = ::epoll_create1(EPOLL_CLOEXEC);
  const int64_t begin = TokenTimes::now();
  int32_t num_begun = 0, num_ended = 0;
  int64_t all_begun_at = 0;
  std::array<epoll_event, 256> ready;
  std::array<char, 65536> piece;
  while (num_ended < load.num_streams) {
    const auto due = static_cast<int32_t>(static_cast<double>(TokenTimes::now() - begin) * 1e-6 * load.streams_per_second) + 1;
    while (num_begun < std::min(due, load.num_streams)) {
      Connection& connection = connections[static_cast<size_t>(num_begun)];
      connection.sent_at = TokenTimes::now();
      ASSIGN_OR_RETURN(connection.socket, ask(load.port, num_begun, load.num_tokens));
      epoll_event event{.events = EPOLLIN, .data = {.u32 = static_cast<uint32_t>(num_begun)}};
      ::epoll_ctl(poller, EPOLL_CTL_ADD, connection.socket, &event);
      if (++num_begun == load.num_streams) all_begun_at = TokenTimes::now();
    }
    const int count = ::epoll_wait(poller, ready.data(), static_cast<int>(ready.size()), num_begun < load.num_streams ? 1 : 1000);
    for (int i = 0; i < count; ++i) {
      const uint32_t stream = ready[static_cast<size_t>(i)].data.u32;
      Connection& connection = connections[stream];
      const ssize_t size = ::recv(connection.socket, piece.data(), piece.size(), 0);
      const int64_t now = TokenTimes::now();
      if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      bool ended = size <= 0;
      if (!ended) {
        connection.rest.append(piece.data(), static_cast<size_t>(size));
        const size_t whole = connection.rest.rfind("\n\n");
        if (whole == std::string::npos) continue;
        const std::string_view events = std::string_view(connection.rest).substr(0, whole);
        const int32_t fresh = count_tokens(events);
        for (int32_t k = 0; k < fresh && connection.num_tokens < load.num_tokens; ++k, ++connection.num_tokens) {
          const int64_t given_at = times.at(static_cast<int32_t>(stream), connection.num_tokens);
          const double ms = static_cast<double>(now - given_at) * 1e-3;
          result.token_ms.push_back(ms);
          if (connection.num_tokens == 0) result.first_token_ms.push_back(static_cast<double>(now - connection.sent_at) * 1e-3);
          if (all_begun_at != 0 && given_at > all_begun_at && num_ended == 0) result.steady_token_ms.push_back(ms);
        }
        ended = events.find("data: [DONE]") != std::string_view::npos;
        connection.rest.erase(0, whole);
      }
      if (!ended) continue;
      if (connection.num_tokens == load.num_tokens) ++result.num_complete;
      ::close(connection.socket);
      ++num_ended;
    }
  }
  ::close(poller);
  return result;
}

}  // namespace quern::tools
