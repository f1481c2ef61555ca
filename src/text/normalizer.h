#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/result.h"

namespace quern::text {

/// Canonical composition (NFC) as Hugging Face `tokenizers` computes it: by Unicode 9.0, whatever ICU's version is. Characters
/// that came later neither move nor compose, as unassigned ones do not. Thread-safe.
class NfcNormalizer {
 public:
  /// Errors: kInternal when the ICU library lacks its data.
  static Result<NfcNormalizer> create();
  NfcNormalizer(NfcNormalizer&&) noexcept;
  NfcNormalizer& operator=(NfcNormalizer&&) noexcept;
  ~NfcNormalizer();

  /// `text` in NFC: `text` itself where it is that already, else `storage`. `text` is valid UTF-8 below 2 GiB.
  std::string_view normalize(std::string_view text, std::string& storage) const;

 private:
  struct Icu;  // its headers stay in normalizer.cpp
  explicit NfcNormalizer(std::unique_ptr<const Icu> icu);
  std::unique_ptr<const Icu> icu_;
};

}  // namespace quern::text
