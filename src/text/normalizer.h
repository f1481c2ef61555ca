#pragma once

#include <string>
#include <string_view>

#include "base/result.h"

namespace quern::text {

/// Unicode canonical composition (NFC), as far as the Unicode version of the ICU library knows the characters. Thread-safe.
class NfcNormalizer {
 public:
  /// Errors: kInternal when the ICU library lacks its data.
  static Result<NfcNormalizer> create();

  /// `text` in NFC: `text` itself where it is that already, else `storage`. `text` is valid UTF-8 below 2 GiB.
  std::string_view normalize(std::string_view text, std::string& storage) const;

 private:
  explicit NfcNormalizer(const void* nfc) : nfc_(nfc) {}
  const void* nfc_;  // icu::Normalizer2, a singleton of the library; its headers stay in normalizer.cpp
};

}  // namespace quern::text
