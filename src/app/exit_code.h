#pragma once

namespace quern::app {

/// What the process tells its caller; docs/cli.md lists them.
enum ExitCode : int {
  kSuccess = 0,
  kFailure = 1,     // something went wrong while doing what was asked
  kUsage = 2,       // the command line itself is wrong
  kDoesNotFit = 3,  // `plan`: the model does not fit the memory
};

}  // namespace quern::app
