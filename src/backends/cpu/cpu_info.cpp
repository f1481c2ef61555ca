#include "backends/cpu/cpu_info.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string_view>
#include <thread>

#include "backends/cpu/thread_pool.h"
#include "base/check.h"
#include "base/log.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

namespace quern::cpu {

namespace {

/// The first word of a small file such as those of /sys/fs/cgroup; empty when there is none.
std::string first_word(const char* path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

uint64_t usable_memory() {
  uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const uint64_t limit = std::strtoull(first_word(path).c_str(), nullptr, 10);  // "max" reads as 0
    if (limit > 0) bytes = std::min(bytes, limit);
  }
  return bytes;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) {
      if (const size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
    }
  return "CPU";
}

#if defined(__x86_64__)
uint64_t enabled_states() {
  uint32_t low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

/// Linux hands out AMX tile registers on request only.
bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

void detect_instructions(ops::DeviceTraits& traits) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  const bool osxsave = c & bit_OSXSAVE, fma = c & bit_FMA;
  if (!osxsave) return;
  const uint64_t states = enabled_states();
  const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6, tiles = (states & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  traits.avx2 = ymm && fma && (b & bit_AVX2);
  traits.avx512 = zmm && (b & bit_AVX512F) && (b & bit_AVX512BW) && (b & bit_AVX512DQ) && (b & bit_AVX512VL);
  traits.avx512_vbmi = traits.avx512 && (c & bit_AVX512VBMI);
  traits.amx_bf16 = tiles && (d & (1u << 24)) && (d & (1u << 22)) && amx_permitted();  // AMX-TILE and AMX-BF16
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) traits.avx512_bf16 = traits.avx512 && (a & bit_AVX512BF16);
}

/// QUERN_CPU_ISA=avx512, =avx2 or =baseline makes this machine one that has no more: for tests, and to compare kernels.
void hide_instructions(ops::DeviceTraits& traits) {
  const char* most = std::getenv("QUERN_CPU_ISA");
  if (most == nullptr) return;
  const std::string_view isa = most;
  if (isa != "avx512" && isa != "avx2" && isa != "baseline") {
    log_warning("QUERN_CPU_ISA={} hides nothing: avx512, avx2 and baseline are known", isa);
    return;
  }
  traits.avx512_vbmi = traits.avx512_bf16 = traits.amx_bf16 = false;
  traits.avx512 = traits.avx512 && isa == "avx512";
  traits.avx2 = traits.avx2 && isa != "baseline";
}
#else
void detect_instructions(ops::DeviceTraits&) {}
void hide_instructions(ops::DeviceTraits&) {}
#endif

}  // namespace

int usable_cores() {
  cpu_set_t set;
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = CPU_COUNT(&set);
  std::ifstream file("/sys/fs/cgroup/cpu.max");  // "QUOTA PERIOD" in microseconds, or "max PERIOD"
  if (double quota = 0, period = 0; file >> quota >> period && period > 0 && quota > 0)
    cores = std::min(cores, std::max(1, static_cast<int>(quota / period + 0.5)));
  return std::max(cores, 1);
}

std::vector<int> parse_number_list(std::string_view text) {
  std::vector<int> numbers;
  const auto take_number = [&]() -> int {  // -1 where there is none
    int number = -1;
    const char* end = std::from_chars(text.data(), text.data() + text.size(), number).ptr;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    return number;
  };
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  for (bool more = !text.empty(); more;) {
    const int first = take_number();
    int last = first;
    if (text.starts_with('-')) {
      text.remove_prefix(1);
      last = take_number();
    }
    if (first < 0 || last < first) return {};
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    more = text.starts_with(',');
    if (more) text.remove_prefix(1);
    else if (!text.empty()) return {};
  }
  return numbers;
}

std::vector<int> memory_nodes() {
  std::string line;
  std::ifstream file("/sys/devices/system/node/has_memory");
  std::getline(file, line);
  std::vector<int> nodes = parse_number_list(line);
  if (nodes.empty()) nodes.push_back(0);
  return nodes;
}

ops::DeviceTraits host_traits() {
  ops::DeviceTraits traits;
  traits.platform = ops::Platform::kCpu;
  traits.name = processor_name();
  traits.memory_bytes = usable_memory();
  traits.num_cores = usable_cores();
  detect_instructions(traits);
  hide_instructions(traits);
  return traits;
}

namespace {

constexpr size_t kReadPage = 1 << 20;

/// Something that depends on every line of the pages [begin, end), read as `Streams` streams side by side with `Ahead` lines of each fetched in advance.
template <size_t Streams, size_t Ahead>
uint64_t read_pages(const std::byte* memory, int64_t begin, int64_t end) {
  constexpr size_t kLine = 64;
  const size_t length = static_cast<size_t>(end - begin) * kReadPage / Streams;
  const std::byte* first = memory + static_cast<size_t>(begin) * kReadPage;
  uint64_t seen[kLine / sizeof(uint64_t)] = {};
  for (size_t at = 0; at < length; at += kLine)
    for (size_t stream = 0; stream < Streams; ++stream) {
      const std::byte* line = first + stream * length + at;
      __builtin_prefetch(line + Ahead * kLine);
      uint64_t words[kLine / sizeof(uint64_t)];
      std::memcpy(words, line, kLine);
      for (size_t i = 0; i < std::size(words); ++i) seen[i] |= words[i];
    }
  uint64_t all = 0;
  for (const uint64_t word : seen) all |= word;
  return all;
}

}  // namespace

double measure_read_bandwidth(int num_threads) {
  constexpr size_t kBytes = size_t{256} << 20, kHugePage = size_t{2} << 20;
  constexpr auto kPages = static_cast<int64_t>(kBytes / kReadPage);
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kHugePage, kBytes), &std::free);
  if (memory == nullptr) return 0;
  madvise(memory.get(), kBytes, MADV_HUGEPAGE);  // as weights lie
  auto* bytes = static_cast<std::byte*>(memory.get());
  ThreadPool pool(num_threads);
  pool.parallel_for(kPages, kReadPage, [&](int64_t begin, int64_t end, int) {
    std::memset(bytes + static_cast<size_t>(begin) * kReadPage, 1, static_cast<size_t>(end - begin) * kReadPage);
  });
  std::atomic<uint64_t> seen{0};  // so that no reading is optimized away
  double best_seconds = 1e9;
  const auto time = [&](const auto& read) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(kPages, kReadPage, [&](int64_t begin, int64_t end, int) { seen |= read(bytes, begin, end); });
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  };
  for (int pass = 0; pass < 4; ++pass) {  // processors differ in which way is the faster one, by up to two times (Zen 3: four streams, Zen 5: one)
    time(read_pages<4, 16>);
    time(read_pages<1, 128>);
  }
  CHECK(seen.load() != 0);
  return static_cast<double>(kBytes) / best_seconds;
}

}  // namespace quern::cpu
