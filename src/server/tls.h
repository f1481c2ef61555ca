#pragma once

#include <openssl/types.h>

#include <filesystem>
#include <memory>

#include "base/result.h"

namespace quern::server {

enum class ClientCertificates { kNone, kOptional, kRequired };

struct TlsOptions {
  std::filesystem::path certificate_file;  // PEM: the server's certificate, then those between it and the root; empty: no TLS
  std::filesystem::path key_file;          // PEM, not encrypted; empty: it stands in the certificate file
  std::filesystem::path ca_file;           // PEM: who may have signed certificates of clients
  ClientCertificates client_certificates = ClientCertificates::kNone;

  [[nodiscard]] bool enabled() const { return !certificate_file.empty(); }
};

struct TlsContextDeleter {
  void operator()(SSL_CTX* context) const;
};
using TlsContext = std::unique_ptr<SSL_CTX, TlsContextDeleter>;

/// TLS 1.2 and 1.3 with OpenSSL's default ciphers. Errors name the option, the file and what is wrong with it: missing, not PEM, encrypted,
/// a key of another certificate. A certificate that has expired is a warning in the log.
Result<TlsContext> make_tls_context(const TlsOptions& options);

}  // namespace quern::server
