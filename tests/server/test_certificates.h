#pragma once

#include <filesystem>
#include <string>

namespace quern::server {

struct CertificateFiles {
  std::filesystem::path certificate, key;  // PEM
};

struct CertificateOptions {
  const CertificateFiles* signer = nullptr;  // null: signed by itself
  bool expired = false;
  std::string passphrase;  // of the key; empty: not encrypted
};

/// Makes folder/name.crt and folder/name.key, for localhost.
CertificateFiles make_certificate(const std::filesystem::path& folder, const std::string& name, const CertificateOptions& options = {});

}  // namespace quern::server
