#include <string>
#include <vector>

#include "app/app.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  return quern::app::run(arguments);
}
