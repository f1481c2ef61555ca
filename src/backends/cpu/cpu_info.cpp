#include "backends/cpu/cpu_info.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>
#include <vector>

#include "backends/cpu/thread_pool.h"

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
#else
void detect_instructions(ops::DeviceTraits&) {}
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

ops::DeviceTraits host_traits() {
  ops::DeviceTraits traits;
  traits.platform = ops::Platform::kCpu;
  traits.name = processor_name();
  traits.memory_bytes = usable_memory();
  traits.num_cores = usable_cores();
  detect_instructions(traits);
  return traits;
}

double measure_read_bandwidth(int num_threads) {
  constexpr size_t kWords = (size_t{256} << 20) / sizeof(uint64_t);
  std::vector<uint64_t> memory(kWords, 1);
  std::vector<uint64_t> sums(static_cast<size_t>(num_threads) * 8);  // a cache line each, so that no sum is optimized away
  ThreadPool pool(num_threads);
  double best_seconds = 1e9;
  for (int pass = 0; pass < 3; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.parallel_for(static_cast<int64_t>(kWords / 8), 8, [&](int64_t begin, int64_t end, int thread) {
      uint64_t sum[8] = {};
      for (int64_t i = begin; i < end; ++i)
        for (int64_t j = 0; j < 8; ++j) sum[j] += memory[static_cast<size_t>(i * 8 + j)];
      for (size_t j = 0; j < 8; ++j) sums[static_cast<size_t>(thread) * 8 + j] += sum[j];
    });
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return static_cast<double>(kWords * sizeof(uint64_t)) / best_seconds;
}

}  // namespace quern::cpu
