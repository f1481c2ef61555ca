#include "http_client.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstdlib>

#include "server/http_message.h"

namespace quern::server {

std::string ClientResponse::header(std::string_view name) const {
  for (size_t begin = head.find("\r\n"); begin != std::string::npos && begin + 2 < head.size(); begin = head.find("\r\n", begin + 2)) {
    const std::string_view rest = std::string_view(head).substr(begin + 2);
    const std::string_view one = rest.substr(0, rest.find("\r\n"));
    const size_t colon = one.find(':');
    if (colon == std::string_view::npos || !equals_ignoring_case(one.substr(0, colon), name)) continue;
    std::string_view value = one.substr(colon + 1);
    while (value.starts_with(' ')) value.remove_prefix(1);
    return std::string(value);
  }
  return {};
}

std::vector<std::string> ClientResponse::event_names() const {
  std::vector<std::string> result;
  for (size_t at = body.starts_with("event: ") ? 0 : body.find("\nevent: "); at != std::string::npos; at = body.find("\nevent: ", at + 1)) {
    const size_t begin = body.find(' ', at) + 1;
    result.push_back(body.substr(begin, body.find('\n', begin) - begin));
  }
  return result;
}

Json ClientResponse::json() const { return Json::parse(body, nullptr, false); }

std::vector<std::string> ClientResponse::events() const {
  std::vector<std::string> result;
  std::string_view rest = body;
  while (rest.starts_with("data: ") || rest.starts_with("event: ")) {
    const size_t end = rest.find("\n\n"), data = rest.find("data: ");
    if (end == std::string_view::npos || data > end) break;
    result.emplace_back(rest.substr(data + 6, end - data - 6));
    rest.remove_prefix(end + 2);
  }
  if (!rest.empty()) result.push_back("not an event: " + std::string(rest));
  return result;
}

std::vector<Json> ClientResponse::chunks() const {
  std::vector<Json> result;
  for (const std::string& event : events()) {
    if (event != "[DONE]") result.push_back(Json::parse(event, nullptr, false));
  }
  return result;
}

void HttpClient::wait_at_most_five_minutes() {
  const timeval timeout{300, 0};
  ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
}

HttpClient::HttpClient(uint16_t port) {
  socket_ = ::socket(AF_INET, SOCK_STREAM, 0);
  wait_at_most_five_minutes();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) close();
}

HttpClient::HttpClient(uint16_t port, const ClientTls& tls) : HttpClient(port) {
  if (socket_ < 0) return;
  ::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
  tls_context_ = SSL_CTX_new(TLS_client_method());
  if (tls.max_version != 0) {
    SSL_CTX_set_security_level(tls_context_, 0);
    SSL_CTX_set_min_proto_version(tls_context_, 0);
    SSL_CTX_set_max_proto_version(tls_context_, tls.max_version);
  }
  if (!tls.certificate_file.empty()) {
    SSL_CTX_use_certificate_chain_file(tls_context_, tls.certificate_file.c_str());
    SSL_CTX_use_PrivateKey_file(tls_context_, tls.key_file.c_str(), SSL_FILETYPE_PEM);
  }
  tls_ = SSL_new(tls_context_);
  SSL_set_fd(tls_, socket_);
  if (SSL_connect(tls_) != 1) close();
}

HttpClient::HttpClient(const std::filesystem::path& unix_socket) {
  socket_ = ::socket(AF_UNIX, SOCK_STREAM, 0);
  wait_at_most_five_minutes();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  unix_socket.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
  if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) close();
}

HttpClient::~HttpClient() {
  close();
  SSL_free(tls_);
  SSL_CTX_free(tls_context_);
}

std::string HttpClient::peer_name() const {
  X509* certificate = tls_ == nullptr ? nullptr : SSL_get1_peer_certificate(tls_);
  if (certificate == nullptr) return {};
  std::array<char, 256> name{};
  X509_NAME_get_text_by_NID(X509_get_subject_name(certificate), NID_commonName, name.data(), static_cast<int>(name.size()));
  X509_free(certificate);
  return name.data();
}

void HttpClient::finish_sending() { ::shutdown(socket_, SHUT_WR); }

void HttpClient::close() {
  if (socket_ >= 0) ::close(socket_);
  socket_ = -1;
}

bool HttpClient::send(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = tls_ != nullptr ? SSL_write(tls_, text.data(), static_cast<int>(text.size()))
                                      : ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
    if (n <= 0) return false;
    text.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

bool HttpClient::send_request(std::string_view method, std::string_view target, std::string_view body, std::string_view extra_headers) {
  std::string text = fmt::format("{} {} HTTP/1.1\r\nHost: localhost\r\n{}", method, target, extra_headers);
  if (!body.empty() || method == "POST") text += fmt::format("Content-Length: {}\r\n", body.size());
  text += "\r\n";
  text += body;
  return send(text);
}

bool HttpClient::fill() {
  std::array<char, 65536> piece;
  const ssize_t n = tls_ != nullptr ? SSL_read(tls_, piece.data(), static_cast<int>(piece.size()))
                                    : ::recv(socket_, piece.data(), piece.size(), 0);
  if (n <= 0) {
    clean_end_ = tls_ != nullptr ? SSL_get_error(tls_, static_cast<int>(n)) == SSL_ERROR_ZERO_RETURN : n == 0;
    return false;
  }
  buffer_.append(piece.data(), static_cast<size_t>(n));
  return true;
}

bool HttpClient::read_until(std::string_view text) {
  while (buffer_.find(text) == std::string::npos) {
    if (!fill()) return false;
  }
  return true;
}

bool HttpClient::at_end() { return buffer_.empty() && !fill(); }

bool HttpClient::at_clean_end() { return at_end() && clean_end_; }

std::optional<std::string> HttpClient::line() {
  if (!read_until("\r\n")) return std::nullopt;
  const size_t end = buffer_.find("\r\n");
  std::string result = buffer_.substr(0, end);
  buffer_.erase(0, end + 2);
  return result;
}

std::optional<std::string> HttpClient::bytes(size_t count) {
  while (buffer_.size() < count) {
    if (!fill()) return std::nullopt;
  }
  std::string result = buffer_.substr(0, count);
  buffer_.erase(0, count);
  return result;
}

std::optional<ClientResponse> HttpClient::read_response(bool head_only) {
  ClientResponse response;
  do {
    if (!read_until("\r\n\r\n")) return std::nullopt;
    const size_t end = buffer_.find("\r\n\r\n");
    response.head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    if (!response.head.starts_with("HTTP/1.1 ")) return std::nullopt;
    response.status = std::atoi(response.head.c_str() + 9);
  } while (response.status == 100);
  if (head_only || response.status == 204 || response.status == 304) return response;
  if (response.header("Transfer-Encoding") == "chunked") {
    while (true) {
      const auto size_line = line();
      if (!size_line) return std::nullopt;
      const size_t size = std::strtoul(size_line->c_str(), nullptr, 16);
      const auto piece = bytes(size + 2);
      if (!piece) return std::nullopt;
      response.body.append(*piece, 0, size);
      if (size == 0) return response;
    }
  }
  if (const std::string length = response.header("Content-Length"); !length.empty()) {
    const auto body = bytes(std::strtoul(length.c_str(), nullptr, 10));
    if (!body) return std::nullopt;
    response.body = *body;
    return response;
  }
  while (fill()) {
  }
  response.body = std::exchange(buffer_, {});
  return response;
}

std::optional<ClientResponse> HttpClient::fetch(uint16_t port, std::string_view method, std::string_view target, std::string_view body,
                                                std::string_view extra_headers) {
  HttpClient client(port);
  if (!client.connected() || !client.send_request(method, target, body, extra_headers)) return std::nullopt;
  return client.read_response(method == "HEAD");
}

}  // namespace quern::server
