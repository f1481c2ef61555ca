#include "text/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/stringpiece.h>
#include <unicode/uniset.h>

#include <cstdint>
#include <limits>

namespace quern::text {

struct NfcNormalizer::Icu {
  Icu(const icu::Normalizer2& latest, icu::UnicodeSet&& known) : characters(std::move(known)), nfc(latest, characters) {}
  icu::UnicodeSet characters;  // borrowed by the next member
  icu::FilteredNormalizer2 nfc;
};

NfcNormalizer::NfcNormalizer(std::unique_ptr<const Icu> icu) : icu_(std::move(icu)) {}
NfcNormalizer::NfcNormalizer(NfcNormalizer&&) noexcept = default;
NfcNormalizer& NfcNormalizer::operator=(NfcNormalizer&&) noexcept = default;
NfcNormalizer::~NfcNormalizer() = default;

Result<NfcNormalizer> NfcNormalizer::create() {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* latest = icu::Normalizer2::getNFCInstance(status);
  icu::UnicodeSet known(UNICODE_STRING_SIMPLE("[:age=9.0:]"), status);  // assigned in Unicode 9.0 or before
  if (U_FAILURE(status)) return make_error(ErrorCode::kInternal, "ICU cannot normalize to NFC: {}", u_errorName(status));
  known.freeze();
  return NfcNormalizer(std::make_unique<const Icu>(*latest, std::move(known)));
}

std::string_view NfcNormalizer::normalize(std::string_view text, std::string& storage) const {
  CHECK(text.size() <= static_cast<size_t>(std::numeric_limits<int32_t>::max()));
  const icu::StringPiece piece(text.data(), static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  if (icu_->nfc.isNormalizedUTF8(piece, status)) return text;
  storage.clear();
  icu::StringByteSink<std::string> sink(&storage);
  icu_->nfc.normalizeUTF8(0, piece, sink, nullptr, status);
  CHECK_MSG(U_SUCCESS(status), u_errorName(status));  // no memory; the text cannot be at fault
  return storage;
}

}  // namespace quern::text
