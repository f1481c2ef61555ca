#include "app/graphics_cards.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "app/format.h"
#include "base/file.h"

namespace quern::app {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kIntel = 0x8086, kNvidia = 0x10de, kAmd = 0x1002;
constexpr uint64_t kGiB = uint64_t{1} << 30;

struct KnownId {
  uint32_t device;
  std::string_view name;
  uint64_t memory_bytes;  // 0: it differs
};
/// Intel's second generation for desktops, chips G21 and G31.
constexpr KnownId kBattlemage[] = {
    {0xe202, "Intel Battlemage", 0},       {0xe209, "Intel Battlemage", 0},         {0xe20b, "Intel Arc B580", 12 * kGiB},     {0xe20c, "Intel Arc B570", 10 * kGiB}, {0xe20d, "Intel Battlemage", 0},
    {0xe210, "Intel Battlemage", 0},       {0xe211, "Intel Arc Pro B60", 24 * kGiB}, {0xe212, "Intel Arc Pro B50", 16 * kGiB}, {0xe215, "Intel Battlemage", 0},      {0xe216, "Intel Battlemage", 0},
    {0xe220, "Intel Battlemage (G31)", 0}, {0xe221, "Intel Battlemage (G31)", 0},   {0xe222, "Intel Battlemage (G31)", 0},     {0xe223, "Intel Arc Pro B70", 32 * kGiB},
};

std::string text_in(const fs::path& file) {
  const auto text = read_file(file);
  if (!text) return {};
  return text->substr(0, text->find_last_not_of(" \n") + 1);
}
uint32_t hex_in(const fs::path& file) {
  const std::string text = text_in(file);
  uint32_t value = 0;
  if (text.starts_with("0x")) std::from_chars(text.data() + 2, text.data() + text.size(), value, 16);
  return value;
}
double number_at(std::string_view text) {
  std::istringstream in{std::string(text)};
  double value = 0;
  in >> value;
  return in ? value : 0;
}

PcieLink link_of(const fs::path& device, const std::string& which) {  // "32.0 GT/s PCIe" and "8"
  return {number_at(text_in(device / (which + "_link_speed"))), static_cast<int>(number_at(text_in(device / (which + "_link_width"))))};
}

/// The device whose link leads to the board. Intel's cards hold a switch, and what is behind its first port reports a link of one slow lane, which is none.
fs::path device_at_the_board(const fs::path& card) {
  constexpr PcieLink kInside{2.5, 1};
  fs::path device = card;
  while (link_of(device, "max") == kInside && !text_in(device.parent_path() / "class").empty()) device = device.parent_path();
  return link_of(device, "max").known() && link_of(device, "max") != kInside ? device : card;
}

GraphicsCard read_card(const fs::path& device) {
  GraphicsCard card;
  card.address = device.filename().string();
  card.vendor = hex_in(device / "vendor");
  card.device = hex_in(device / "device");
  card.name = fmt::format("{} {:04x}:{:04x}", card.vendor == kIntel ? "Intel" : card.vendor == kNvidia ? "NVIDIA" : "AMD", card.vendor, card.device);
  for (const KnownId& known : kBattlemage)
    if (card.vendor == kIntel && known.device == card.device) {
      card.name = known.name;
      card.is_battlemage = true;
      card.memory_bytes = known.memory_bytes;
    }
  std::error_code error;
  if (const fs::path driver = fs::read_symlink(device / "driver", error); !error) card.kernel_driver = driver.filename().string();
  const fs::path at_board = device_at_the_board(device);
  card.link = link_of(at_board, "current");
  card.fastest_link = link_of(at_board, "max");
  card.window_bytes = largest_window(text_in(device / "resource"));
  if (const std::string node = text_in(device / "numa_node"); !node.empty()) card.numa_node = static_cast<int>(number_at(node));
  for (const auto& entry : fs::directory_iterator(device / "drm", error))
    if (const std::string name = entry.path().filename().string(); name.starts_with("renderD")) card.render_node = name;
  return card;
}

}  // namespace

double PcieLink::bytes_per_second() const {
  const double coding = gigatransfers < 8 ? 8.0 / 10 : 128.0 / 130;
  return gigatransfers * 1e9 * width * coding / 8;
}

std::string describe(const PcieLink& link) {
  if (!link.known()) return "unknown";
  constexpr std::pair<double, const char*> kGenerations[] = {{2.5, "1.0"}, {5, "2.0"}, {8, "3.0"}, {16, "4.0"}, {32, "5.0"}, {64, "6.0"}};
  for (const auto& [rate, generation] : kGenerations)
    if (rate == link.gigatransfers) return fmt::format("PCIe {} x{} ({:.1f} GB/s)", generation, link.width, link.bytes_per_second() / 1e9);
  return fmt::format("PCIe {} GT/s x{}", link.gigatransfers, link.width);
}

std::vector<GraphicsCard> find_graphics_cards(const fs::path& sys) {
  std::vector<GraphicsCard> cards;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(sys / "bus/pci/devices", error)) {
    const fs::path device = fs::canonical(entry.path(), error);
    if (error) continue;
    constexpr uint32_t kDisplay = 0x03;
    const uint32_t vendor = hex_in(device / "vendor");
    if (hex_in(device / "class") >> 16 == kDisplay && (vendor == kIntel || vendor == kNvidia || vendor == kAmd)) cards.push_back(read_card(device));
  }
  std::sort(cards.begin(), cards.end(), [](const GraphicsCard& a, const GraphicsCard& b) { return a.address < b.address; });
  return cards;
}

uint64_t largest_window(std::string_view resource) {
  constexpr uint64_t kMemory = 0x200;  // IORESOURCE_MEM
  uint64_t largest = 0;
  std::istringstream in{std::string(resource)};
  uint64_t begin = 0, end = 0, flags = 0;
  while (in >> std::hex >> begin >> end >> flags)
    if ((flags & kMemory) != 0 && end > begin) largest = std::max(largest, end - begin + 1);
  return largest;
}

std::string nvidia_driver_version(std::string_view text) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  ...": the first word of digits and points.
  std::istringstream in{std::string(text.substr(0, text.find('\n')))};
  for (std::string word; in >> word;)
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) return word;
  return {};
}

}  // namespace quern::app
