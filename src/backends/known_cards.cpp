#include "backends/known_cards.h"

namespace quern::backends {

namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;
using enum ops::Platform;

// Memory as drivers report it, about a percent below the label for cards that we have not met (H200: read on the device).
constexpr KnownCard kCards[] = {
    {"h200", "NVIDIA H200", kCuda, 150754820096, 4.8e12, 132, 90, true},
    {"h100", "NVIDIA H100 80GB HBM3", kCuda, 79 * kGiB, 3.35e12, 132, 90, true},
    {"a100", "NVIDIA A100 80GB", kCuda, 79 * kGiB, 2.039e12, 108, 80, false},
    {"rtxa6000", "NVIDIA RTX A6000", kCuda, 47 * kGiB, 768e9, 84, 86, false},
    {"rtx3090", "NVIDIA GeForce RTX 3090", kCuda, 47 * kGiB / 2, 936e9, 82, 86, false},
    {"l40s", "NVIDIA L40S", kCuda, 44 * kGiB, 864e9, 142, 89, true},
    {"rtx4090", "NVIDIA GeForce RTX 4090", kCuda, 47 * kGiB / 2, 1.008e12, 128, 89, true},
    {"rtx5090", "NVIDIA GeForce RTX 5090", kCuda, 31 * kGiB, 1.792e12, 170, 120, true},
    {"rtx6000ada", "NVIDIA RTX 6000 Ada Generation", kCuda, 47 * kGiB, 960e9, 142, 89, true},
    {"rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell", kCuda, 94 * kGiB, 1.792e12, 188, 120, true},
    {"b60", "Intel Arc Pro B60", kOpenCl, 24 * kGiB, 456e9, 20, 2021, false, 20 * 8 * 2.4e9},
    {"b70", "Intel Arc Pro B70", kOpenCl, 32 * kGiB, 608e9, 32, 2031, false, 32 * 8 * 2.8e9},
};

}  // namespace

std::span<const KnownCard> known_card_table() { return kCards; }

}  // namespace quern::backends
