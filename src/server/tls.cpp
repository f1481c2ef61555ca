#include "server/tls.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <array>

#include "base/file.h"
#include "base/log.h"

namespace quern::server {
namespace {

/// OpenSSL's last reason in words; its queue is empty afterwards.
std::string last_reason() {
  const unsigned long code = ERR_peek_last_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "unknown reason" : reason;
}

/// OpenSSL would ask for a passphrase on the terminal; a server has nobody to answer.
int note_encrypted(char*, int, int, void* encrypted) {
  *static_cast<bool*>(encrypted) = true;
  return 0;
}

Result<void> check_readable(std::string_view option, const std::filesystem::path& file) {
  std::error_code error;
  if (std::filesystem::is_directory(file, error)) return invalid_argument("{} {}: is a directory", option, file.string());
  if (Result<std::string> text = read_file(file); !text) return std::move(text).error().with_context(option);
  return {};
}

}  // namespace

void TlsContextDeleter::operator()(SSL_CTX* context) const { SSL_CTX_free(context); }

Result<TlsContext> make_tls_context(const TlsOptions& options) {
  ERR_clear_error();
  TlsContext context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return make_error(ErrorCode::kInternal, "OpenSSL cannot make a TLS context: {}", last_reason());
  SSL_CTX* const c = context.get();
  SSL_CTX_set_min_proto_version(c, TLS1_2_VERSION);
  SSL_CTX_set_options(c, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(c, SSL_MODE_RELEASE_BUFFERS);  // an idle connection keeps no buffers of 17 kB

  const std::string certificate = options.certificate_file.string();
  RETURN_IF_ERROR(check_readable("--ssl-certfile", options.certificate_file));
  if (SSL_CTX_use_certificate_chain_file(c, certificate.c_str()) != 1) {
    return invalid_argument("--ssl-certfile {}: no certificate in PEM format could be read from it ({})", certificate, last_reason());
  }
  const X509* const own = SSL_CTX_get0_certificate(c);
  if (X509_cmp_current_time(X509_get0_notAfter(own)) < 0) {
    log_warning("--ssl-certfile {}: the certificate has EXPIRED; clients that check it will refuse this server", certificate);
  }

  const bool separate = !options.key_file.empty();
  const std::string key = (separate ? options.key_file : options.certificate_file).string();
  const std::string_view key_option = separate ? "--ssl-keyfile" : "--ssl-certfile";
  if (separate) RETURN_IF_ERROR(check_readable("--ssl-keyfile", options.key_file));
  bool encrypted = false;
  SSL_CTX_set_default_passwd_cb(c, note_encrypted);
  SSL_CTX_set_default_passwd_cb_userdata(c, &encrypted);
  const bool has_key = SSL_CTX_use_PrivateKey_file(c, key.c_str(), SSL_FILETYPE_PEM) == 1;
  SSL_CTX_set_default_passwd_cb(c, nullptr);
  SSL_CTX_set_default_passwd_cb_userdata(c, nullptr);
  if (!has_key) {
    const std::string reason = last_reason();
    if (encrypted) return invalid_argument("{} {}: the key is encrypted; `openssl pkey -in KEY -out PLAIN` removes the passphrase", key_option, key);
    if (reason == "key values mismatch") return invalid_argument("{} {}: the key is not that of the certificate {}", key_option, key, certificate);
    return invalid_argument("{} {}: no private key in PEM format could be read from it ({}){}", key_option, key, reason,
                            separate ? "" : "; --ssl-keyfile names a file of its own");
  }
  if (SSL_CTX_check_private_key(c) != 1) {
    ERR_clear_error();
    return invalid_argument("{} {}: the key is not that of the certificate {}", key_option, key, certificate);
  }

  if (options.client_certificates != ClientCertificates::kNone) {
    if (options.ca_file.empty()) return invalid_argument("--ssl-cert-reqs: certificates of clients need --ssl-ca-certs, which says who may sign them");
    RETURN_IF_ERROR(check_readable("--ssl-ca-certs", options.ca_file));
    const std::string authorities = options.ca_file.string();
    if (SSL_CTX_load_verify_locations(c, authorities.c_str(), nullptr) != 1) {
      return invalid_argument("--ssl-ca-certs {}: no certificate in PEM format could be read from it ({})", authorities, last_reason());
    }
    SSL_CTX_set_client_CA_list(c, SSL_load_client_CA_file(authorities.c_str()));
    const bool required = options.client_certificates == ClientCertificates::kRequired;
    SSL_CTX_set_verify(c, SSL_VERIFY_PEER | (required ? SSL_VERIFY_FAIL_IF_NO_PEER_CERT : 0), nullptr);
    constexpr std::array<unsigned char, 5> kSessionContext{'q', 'u', 'e', 'r', 'n'};  // sessions with verified clients need one to be resumed
    SSL_CTX_set_session_id_context(c, kSessionContext.data(), kSessionContext.size());
  }
  ERR_clear_error();
  return Result<TlsContext>(std::move(context));
}

}  // namespace quern::server
