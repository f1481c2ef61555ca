#include "text/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/stringpiece.h>

#include <cstdint>
#include <limits>

namespace quern::text {

Result<NfcNormalizer> NfcNormalizer::create() {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(status);
  if (U_FAILURE(status)) return make_error(ErrorCode::kInternal, "ICU cannot normalize to NFC: {}", u_errorName(status));
  return NfcNormalizer(nfc);
}

std::string_view NfcNormalizer::normalize(std::string_view text, std::string& storage) const {
  CHECK(text.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()));
  const auto& nfc = *static_cast<const icu::Normalizer2*>(nfc_);
  const icu::StringPiece piece(text.data(), static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  if (nfc.isNormalizedUTF8(piece, status)) return text;
  storage.clear();
  icu::StringByteSink<std::string> sink(&storage);
  nfc.normalizeUTF8(0, piece, sink, nullptr, status);
  CHECK_MSG(U_SUCCESS(status), u_errorName(status));  // no memory; the text cannot be at fault
  return storage;
}

}  // namespace quern::text
