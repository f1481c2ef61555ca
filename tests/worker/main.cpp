#include <cstdio>

#include "worker/runner_fixture.h"

// Runs the tests of the worker on one device (QUERN_TEST_DEVICE). Exit code 77: the machine lacks it.

int main(int argc, char** argv) {
  using namespace quern;
  ::testing::InitGoogleMock(&argc, argv);
  if (const auto device = backends::open_device(worker::device_under_test(), {}); !device) {
    std::printf("SKIPPED: %s\n", device.error().message.c_str());
    return 77;
  }
  return RUN_ALL_TESTS();
}
