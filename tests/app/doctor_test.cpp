#include "app/doctor_findings.h"

#include <sys/stat.h>

#include <fstream>

#include "app/program.h"
#include "base/json.h"
#include "support/test_support.h"

// Cards and drivers, read from trees that look like /sys and /dev, and what is found wrong with them.

namespace quern::app {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kGiB = uint64_t{1} << 30;

/// A made-up /sys and /dev.
class Board : public ::testing::Test {
 protected:
  void write(const std::filesystem::path& file, std::string_view text) {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }
  /// A device below `parent`, a folder of sys/devices.
  std::filesystem::path device(const std::filesystem::path& parent, const std::string& address, std::string_view id, std::string_view of_class, PcieLink now = {}, PcieLink fastest = {}) {
    const std::filesystem::path folder = parent / address;
    write(folder / "vendor", fmt::format("0x{}", id.substr(0, 4)));
    write(folder / "device", fmt::format("0x{}", id.substr(5)));
    write(folder / "class", of_class);
    write(folder / "numa_node", "-1");
    const auto write_link = [&](const char* which, const PcieLink& link) {
      if (!link.known()) return;
      write(folder / fmt::format("{}_link_speed", which), fmt::format("{:.1f} GT/s PCIe", link.gigatransfers));
      write(folder / fmt::format("{}_link_width", which), fmt::format("{}", link.width));
    };
    write_link("current", now);
    write_link("max", fastest);
    std::filesystem::create_directories(root_ / "sys/bus/pci/devices");
    std::filesystem::create_directory_symlink(root_ / folder, root_ / "sys/bus/pci/devices" / address);
    return folder;
  }
  /// An Intel card as it is: a switch whose first port is the link to the board, and behind it ports of one slow lane.
  void intel_card(int bus, std::string_view id, PcieLink now, uint64_t window, std::string_view driver = "xe") {
    constexpr PcieLink kFastest{32, 8}, kInside{2.5, 1};
    const auto at = [&](int offset) { return fmt::format("0000:{:02x}:00.0", bus + offset); };
    const std::filesystem::path root_port = device("sys/devices/pci0000:00", fmt::format("0000:00:{:02x}.0", bus), "8086:a70d", "0x060400", now, {32, 16});
    const std::filesystem::path first = device(root_port, at(0), "8086:e2ff", "0x060400", now, kFastest);
    const std::filesystem::path second = device(first, at(1), "8086:e2f0", "0x060400", kInside, kInside);
    const std::filesystem::path card = device(second, at(2), id, "0x030000", kInside, kInside);
    write(card / "resource", fmt::format("0x0000000081000000 0x0000000081ffffff 0x0000000000140204\n0x0000000000000000 0x0000000000000000 0x0000000000000000\n"
                                         "0x{:016x} 0x{:016x} 0x000000000014220c", 0x6000000000ull, 0x6000000000ull + window - 1));
    if (!driver.empty()) {
      std::filesystem::create_directories(root_ / "sys/bus/pci/drivers" / driver);
      std::filesystem::create_directory_symlink(root_ / "sys/bus/pci/drivers" / driver, root_ / card / "driver");
    }
    std::filesystem::create_directories(root_ / card / "drm/card0");
    std::filesystem::create_directories(root_ / card / fmt::format("drm/renderD{}", 126 + bus));
  }
  std::vector<GraphicsCard> cards() { return find_graphics_cards(root_ / "sys"); }
  /// Of the board's cards, with the devices that OpenCL lists for them.
  DriverFacts facts(std::string_view driver_version = "26.27.39122.14") {
    DriverFacts facts;
    facts.cards = cards();
    for (const GraphicsCard& card : facts.cards) {
      if (!card.is_battlemage) continue;
      worker::OpenClDevice device;
      device.name = card.name;
      device.driver_version = driver_version;
      device.pci_address = card.address;
      device.is_intel_gpu = true;
      device.memory_bytes = card.memory_bytes;
      facts.opencl_devices.push_back(device);
    }
    return facts;
  }

  TemporaryFolder folder_;
  std::filesystem::path root_ = folder_.path();
};

TEST_F(Board, ACardsLinkIsTheOneThatLeadsToTheBoard) {
  intel_card(2, "8086:e211", {32, 8}, 32 * kGiB);
  device("sys/devices/pci0000:00", "0000:40:00.0", "10de:2335", "0x030200", {32, 16}, {32, 16});
  device("sys/devices/pci0000:00", "0000:41:00.0", "144d:a80a", "0x010802", {16, 4}, {16, 4});  // a disk
  const std::vector<GraphicsCard> found = cards();
  ASSERT_EQ(found.size(), 2u);
  EXPECT_EQ(found[0].address, "0000:04:00.0");
  EXPECT_EQ(found[0].name, "Intel Arc Pro B60");
  EXPECT_TRUE(found[0].is_battlemage);
  EXPECT_EQ(found[0].kernel_driver, "xe");
  EXPECT_EQ(found[0].link, (PcieLink{32, 8}));
  EXPECT_EQ(found[0].fastest_link, (PcieLink{32, 8}));
  EXPECT_EQ(found[0].window_bytes, 32 * kGiB);
  EXPECT_EQ(found[0].render_node, "renderD128");
  EXPECT_EQ(found[1].name, "NVIDIA 10de:2335");
  EXPECT_EQ(found[1].link, (PcieLink{32, 16}));
  EXPECT_EQ(describe(found[0].link), "PCIe 5.0 x8 (31.5 GB/s)");
  EXPECT_EQ(describe(PcieLink{}), "unknown");
  EXPECT_THAT(findings(facts()), IsEmpty());
  EXPECT_THAT(find_graphics_cards(root_ / "nowhere"), IsEmpty());
}

TEST_F(Board, SmallWindowsNarrowLinksAndMissingDriversAreFound) {
  intel_card(2, "8086:e211", {32, 8}, 256 << 20);
  EXPECT_THAT(findings(facts()), ElementsAre(AllOf(HasSubstr("Intel Arc Pro B60 (0000:04:00.0)"), HasSubstr("Resizable BAR"))));
  intel_card(8, "8086:e223", {16, 4}, 32 * kGiB);
  EXPECT_THAT(findings(facts()), Contains(AllOf(HasSubstr("Intel Arc Pro B70"), HasSubstr("has 4 of its 8 lanes"))));
  intel_card(16, "8086:e211", {2.5, 8}, 32 * kGiB);
  EXPECT_THAT(findings(facts()), Contains(AllOf(HasSubstr("PCIe 1.0 x8"), HasSubstr("PCIe 5.0 x8"), HasSubstr("idle"))));
  intel_card(24, "8086:e211", {32, 8}, 32 * kGiB, "");
  EXPECT_THAT(findings(facts()), Contains(HasSubstr("has no kernel driver")));
}

TEST_F(Board, CardsThatOpenClDoesNotListAreFound) {
  intel_card(2, "8086:e211", {32, 8}, 32 * kGiB);
  intel_card(8, "8086:e211", {32, 8}, 32 * kGiB);
  DriverFacts one = facts();
  one.opencl_devices.pop_back();
  EXPECT_THAT(findings(one), ElementsAre(AllOf(HasSubstr("2 Battlemage cards"), HasSubstr("lists 1 Intel GPU:"))));
  DriverFacts none = facts();
  none.opencl_devices.clear();
  none.why_no_opencl = "libOpenCL.so.1 is not installed";
  EXPECT_THAT(findings(none), ElementsAre(HasSubstr("libOpenCL.so.1 is not installed")));
  // Without such a card OpenCL is nobody's concern.
  DriverFacts elsewhere;
  elsewhere.why_no_opencl = none.why_no_opencl;
  EXPECT_THAT(findings(elsewhere), IsEmpty());
}

TEST_F(Board, ReleasesOfTheDriverThatAreKnownForSomethingAreFound) {
  intel_card(2, "8086:e211", {32, 8}, 32 * kGiB);
  EXPECT_THAT(findings(facts("23.43.27642.40")), ElementsAre(HasSubstr("older than these cards")));
  EXPECT_THAT(findings(facts("25.48.36300.8")), IsEmpty()) << "one card";
  intel_card(8, "8086:e211", {32, 8}, 32 * kGiB);
  for (const char* version : {"25.44.36015.5", "26.14.37833.4"}) EXPECT_THAT(findings(facts(version)), ElementsAre(HasSubstr("several Battlemage cards"))) << version;
  for (const char* version : {"25.43.1.1", "26.15.1.1", "26.27.39122.14", "580.159.04", "3.1"}) EXPECT_THAT(findings(facts(version)), IsEmpty()) << version;
}

TEST(DoctorParsers, ReadReleasesWindowsAndVersions) {
  EXPECT_EQ(intel_driver_release("25.44.36015.5"), 2544);
  EXPECT_EQ(intel_driver_release("26.05.37020.3"), 2605);
  for (const char* none : {"", "25", "25.", "580.159.04", "6.0", "24.99.1", "a.b.c"}) EXPECT_EQ(intel_driver_release(none), 0) << none;
  EXPECT_EQ(largest_window("0x1000 0x1fff 0x200\n0x0 0x0 0x0\n0x2000 0x2fff 0x101\n"), 4096u) << "a port range is none";
  EXPECT_EQ(largest_window(""), 0u);
  EXPECT_EQ(nvidia_driver_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build  (x@y)  Tue\nGCC version: gcc 12.3.0\n"), "580.159.04");
  EXPECT_EQ(nvidia_driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release"), "570.86.15");
  EXPECT_EQ(nvidia_driver_version("nothing of it"), "");
}

TEST(DoctorPermissions, ANodeIsUsableForItsOwnerItsGroupOrAll) {
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "dri");
  const std::string file = (folder.path() / "dri/renderD128").string();
  std::ofstream(file) << "";
  struct stat info {};
  ASSERT_EQ(stat(file.c_str(), &info), 0);
  using State = NodeAccess::State;
  const uint32_t stranger = info.st_uid + 1000;
  const std::vector<uint32_t> in_group{1, static_cast<uint32_t>(info.st_gid)}, outside{static_cast<uint32_t>(info.st_gid) + 1000};
  const auto state = [&](mode_t mode, uint32_t user, const std::vector<uint32_t>& groups) {
    EXPECT_EQ(chmod(file.c_str(), mode), 0);
    return check_node(folder.path(), "renderD128", user, groups).state;
  };
  EXPECT_EQ(state(0660, stranger, in_group), State::kUsable);
  EXPECT_EQ(state(0660, stranger, outside), State::kForbidden);
  EXPECT_EQ(state(0640, stranger, in_group), State::kForbidden) << "reading is not enough";
  EXPECT_EQ(state(0666, stranger, outside), State::kUsable);
  EXPECT_EQ(state(0600, stranger, in_group), State::kForbidden);
  EXPECT_EQ(state(0000, 0, {}), State::kUsable) << "root";
  EXPECT_EQ(check_node(folder.path(), "renderD129", 0, {}).state, State::kMissing);

  DriverFacts facts;
  facts.nodes = {{"renderD128", State::kForbidden, "render"}, {"renderD129", State::kMissing, ""}, {"renderD130", State::kUsable, "render"}};
  EXPECT_THAT(findings(facts), ElementsAre(AllOf(HasSubstr("renderD128"), HasSubstr("usermod -aG render")), HasSubstr("--device /dev/dri")));
}

TEST(Doctor, PrintsWhatABugReportNeeds) {
  const auto text = quern::testing::run_quern({"doctor"});
  EXPECT_EQ(text.exit_code, 0) << text.log;
  for (const char* word : {"quern  ", "system  ", "Linux ", "cpu  ", "device     cpu"}) EXPECT_THAT(text.output, HasSubstr(word));
  EXPECT_TRUE(text.output.find("findings   ") != std::string::npos || text.output.find("finding    ") != std::string::npos);
  const auto json = quern::testing::run_quern({"doctor", "--json"});
  EXPECT_EQ(json.exit_code, 0) << json.log;
  const auto found = parse_json(json.output, "doctor");
  ASSERT_OK(found);
  for (const char* key : {"version", "build", "system", "cpu", "memory", "devices", "graphics_cards", "opencl", "nvidia_driver", "findings", "libraries"}) EXPECT_TRUE(found->contains(key)) << key;
  EXPECT_NE((*found)["system"]["kernel"], "");
  EXPECT_THAT((*found)["devices"].dump(), Not(IsEmpty()));
}

}  // namespace
}  // namespace quern::app
