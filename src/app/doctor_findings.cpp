#include "app/doctor_findings.h"

#include <fmt/format.h>
#include <grp.h>
#include <sys/stat.h>

#include <algorithm>
#include <charconv>

#include "app/format.h"

namespace quern::app {
namespace {

/// Releases of Intel's driver (intel/compute-runtime) that are known for something, by year and week.
struct KnownRelease {
  int first, last;
  bool several_cards;  // matters only where there is more than one
  std::string_view what;
};
constexpr KnownRelease kKnownReleases[] = {
    // Debian 12 has 22.43, Ubuntu 24.04 itself 23.43; neither knows Xe2.
    {1, 2343, false, "is older than these cards; docs/intel.md says where newer ones come from"},
    // intel/compute-runtime 916, 921, 930 and others: contexts of several cards broke, compressed memory that cards share came back as garbage.
    {2544, 2614, true, "is among those that had faults with several Battlemage cards (25.44 to 26.14); a newer one is the first thing to try where a card is lost or texts are garbage"},
};

const worker::OpenClDevice* device_of(const DriverFacts& facts, const GraphicsCard& card) {
  for (const worker::OpenClDevice& device : facts.opencl_devices)
    if (device.pci_address == card.address) return &device;
  return nullptr;
}

std::string group_name(uint32_t id) {
  group entry{}, *found = nullptr;
  std::vector<char> text(4096);
  if (getgrgid_r(id, &entry, text.data(), text.size(), &found) != 0 || found == nullptr) return fmt::format("{}", id);
  return found->gr_name;
}

/// Of one card, before anything is asked of a driver.
void look_at_card(const DriverFacts& facts, const GraphicsCard& card, std::vector<std::string>& found) {
  const std::string who = fmt::format("{} ({})", card.name, card.address);
  if (card.is_battlemage && card.kernel_driver.empty())
    found.push_back(fmt::format("{} has no kernel driver: `xe` takes it from Linux 6.12 on (in Ubuntu 24.04 with the hardware-enablement kernel, package linux-generic-hwe-24.04)", who));
  const worker::OpenClDevice* device = device_of(facts, card);
  const uint64_t memory = device != nullptr ? device->memory_bytes : card.memory_bytes;
  if (card.is_battlemage && card.window_bytes > 0 && card.window_bytes < memory / 10 * 9)
    found.push_back(fmt::format("{}: the host sees {} of its {} at a time. Switch on Resizable BAR and Above 4G Decoding in the firmware's setup: with the kernel driver xe, Intel's OpenCL "
                                "driver does not list a card without them", who, format_bytes(card.window_bytes), format_bytes(memory)));
  if (card.link.known() && card.fastest_link.known() && card.link.width < card.fastest_link.width)
    found.push_back(fmt::format("{} has {} of its {} lanes: another slot may have them all, and several cards exchange their sums through this link", who, card.link.width, card.fastest_link.width));
  else if (card.link.known() && card.fastest_link.known() && card.link.gigatransfers < card.fastest_link.gigatransfers)
    found.push_back(fmt::format("{}: the link runs at {}, the card is able to {}. An idle card may save power so; look again while it works", who, describe(card.link), describe(card.fastest_link)));
}

}  // namespace

int intel_driver_release(std::string_view version) {
  int year = 0, week = 0;
  const char* const end = version.data() + version.size();
  const auto after_year = std::from_chars(version.data(), end, year);
  if (after_year.ec != std::errc() || after_year.ptr == end || *after_year.ptr != '.') return 0;
  const auto after_week = std::from_chars(after_year.ptr + 1, end, week);
  if (after_week.ec != std::errc() || after_week.ptr == end || *after_week.ptr != '.' || year < 10 || year > 99 || week < 1 || week > 53) return 0;
  return 100 * year + week;
}

NodeAccess check_node(const std::filesystem::path& dev, const std::string& node, uint32_t user, const std::vector<uint32_t>& user_groups) {
  NodeAccess access;
  access.node = node;
  struct stat info {};
  if (stat((dev / "dri" / node).c_str(), &info) != 0) {
    access.state = NodeAccess::State::kMissing;
    return access;
  }
  access.group = group_name(info.st_gid);
  constexpr mode_t kReadWrite = 6;
  const auto grants = [&](int shift) { return (info.st_mode >> shift & kReadWrite) == kReadWrite; };
  const bool in_group = std::find(user_groups.begin(), user_groups.end(), info.st_gid) != user_groups.end();
  const bool granted = user == 0 || (info.st_uid == user ? grants(6) : in_group ? grants(3) : grants(0));
  access.state = granted ? NodeAccess::State::kUsable : NodeAccess::State::kForbidden;
  return access;
}

std::vector<std::string> findings(const DriverFacts& facts) {
  std::vector<std::string> found;
  const auto is_ours = [](const GraphicsCard& card) { return card.is_battlemage; };
  const auto num_battlemage = std::count_if(facts.cards.begin(), facts.cards.end(), is_ours);
  for (const NodeAccess& node : facts.nodes) {
    if (node.state == NodeAccess::State::kMissing)
      found.push_back(fmt::format("/dev/dri/{} is not here, though the kernel has it: a container needs --device /dev/dri", node.node));
    if (node.state == NodeAccess::State::kForbidden)
      found.push_back(fmt::format("/dev/dri/{} may not be used by this user: join its group with `sudo usermod -aG {} $USER` and log in again (a container needs --group-add)", node.node, node.group));
  }
  for (const GraphicsCard& card : facts.cards) look_at_card(facts, card, found);
  if (num_battlemage > 0 && !facts.why_no_opencl.empty()) found.push_back(fmt::format("no Intel card can be used: {}", facts.why_no_opencl));
  const auto num_listed = std::count_if(facts.opencl_devices.begin(), facts.opencl_devices.end(), [](const auto& d) { return d.is_intel_gpu; });
  if (facts.why_no_opencl.empty() && num_listed < num_battlemage)
    found.push_back(fmt::format("the board has {} Battlemage card{}, OpenCL lists {} Intel GPU{}: no driver is installed for them (package intel-opencl-icd), or it refuses a card for a reason above",
                                num_battlemage, num_battlemage == 1 ? "" : "s", num_listed, num_listed == 1 ? "" : "s"));
  for (const worker::OpenClDevice& device : facts.opencl_devices) {
    if (!device.is_intel_gpu) continue;
    const int release = intel_driver_release(device.driver_version);
    for (const KnownRelease& known : kKnownReleases)
      if (known.first <= release && release <= known.last && num_battlemage > (known.several_cards ? 1 : 0)) {
        std::string sentence = fmt::format("driver {} {}", device.driver_version, known.what);
        if (std::find(found.begin(), found.end(), sentence) == found.end()) found.push_back(std::move(sentence));
      }
  }
  return found;
}

}  // namespace quern::app
