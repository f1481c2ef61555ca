#include "test_certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <memory>

#include "base/check.h"

namespace quern::server {
namespace {

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;
using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;

File open(const std::filesystem::path& path, const char* mode) {
  File file(std::fopen(path.c_str(), mode), &std::fclose);
  CHECK(file != nullptr);
  return file;
}

}  // namespace

CertificateFiles make_certificate(const std::filesystem::path& folder, const std::string& name, const CertificateOptions& options) {
  const Key key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  const Certificate certificate(X509_new(), &X509_free);
  CHECK(key != nullptr && certificate != nullptr);
  X509_set_version(certificate.get(), X509_VERSION_3);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -7200);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), options.expired ? -3600 : 3600);
  X509_set_pubkey(certificate.get(), key.get());
  X509_NAME* subject = X509_get_subject_name(certificate.get());
  X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  if (options.signer == nullptr) {
    X509_set_issuer_name(certificate.get(), subject);
    X509_EXTENSION* authority = X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, "critical,CA:TRUE");
    CHECK(authority != nullptr && X509_add_ext(certificate.get(), authority, -1) == 1);
    X509_EXTENSION_free(authority);
    CHECK(X509_sign(certificate.get(), key.get(), EVP_sha256()) > 0);
  } else {
    const Certificate issuer(PEM_read_X509(open(options.signer->certificate, "r").get(), nullptr, nullptr, nullptr), &X509_free);
    const Key issuer_key(PEM_read_PrivateKey(open(options.signer->key, "r").get(), nullptr, nullptr, nullptr), &EVP_PKEY_free);
    CHECK(issuer != nullptr && issuer_key != nullptr);
    X509_set_issuer_name(certificate.get(), X509_get_subject_name(issuer.get()));
    CHECK(X509_sign(certificate.get(), issuer_key.get(), EVP_sha256()) > 0);
  }
  CertificateFiles files{folder / (name + ".crt"), folder / (name + ".key")};
  CHECK(PEM_write_X509(open(files.certificate, "w").get(), certificate.get()) == 1);
  const bool encrypted = !options.passphrase.empty();
  CHECK(PEM_write_PrivateKey(open(files.key, "w").get(), key.get(), encrypted ? EVP_aes_128_cbc() : nullptr,
                             encrypted ? reinterpret_cast<const unsigned char*>(options.passphrase.data()) : nullptr,
                             static_cast<int>(options.passphrase.size()), nullptr, nullptr) == 1);
  return files;
}

}  // namespace quern::server
