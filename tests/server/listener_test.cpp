#include "server/listener.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;

TEST(Listener, ReplacesTheSocketFileOfADeadServer) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "s").string();
  {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    const int dead = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ASSERT_EQ(::bind(dead, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    ASSERT_EQ(::listen(dead, 1), 0);
    ::close(dead);
  }
  ASSERT_TRUE(std::filesystem::exists(path));
  {
    const auto listener = Listener::unix_socket(path);
    ASSERT_OK(listener);
    EXPECT_EQ(listener->port(), 0);
    const auto second = Listener::unix_socket(path);  // and leaves that of a live one alone
    ASSERT_FALSE(second);
    EXPECT_THAT(second.error().message, HasSubstr("another server listens there"));
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(Listener, LeavesWhatIsNoSocketAlone) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "notes";
  ASSERT_OK(write_file(path, "precious"));
  const auto listener = Listener::unix_socket(path.string());
  ASSERT_FALSE(listener);
  EXPECT_THAT(listener.error().message, HasSubstr("not a socket"));
  EXPECT_EQ(*read_file(path), "precious");
}

TEST(Listener, RemovesOnlyItsOwnSocketFile) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "s";
  {
    const auto first = Listener::unix_socket(path.string());
    ASSERT_OK(first);
    std::filesystem::remove(path);
    ASSERT_OK(write_file(path, "somebody else's"));
  }
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST(Listener, SaysWhatIsWrongWithAPath) {
  const auto long_path = Listener::unix_socket("/tmp/" + std::string(200, 'x'));
  ASSERT_FALSE(long_path);
  EXPECT_THAT(long_path.error().message, HasSubstr("1 to 107 bytes"));
  const auto no_folder = Listener::unix_socket("/no/such/folder/s");
  ASSERT_FALSE(no_folder);
  EXPECT_THAT(no_folder.error().message, HasSubstr("No such file or directory"));
}

TEST(Listener, TwoCannotHaveOnePort) {
  const auto first = Listener::tcp("127.0.0.1", 0);
  ASSERT_OK(first);
  ASSERT_NE(first->port(), 0);
  const auto second = Listener::tcp("127.0.0.1", first->port());
  ASSERT_FALSE(second);
  EXPECT_THAT(second.error().message, HasSubstr("the port is in use by another program"));
}

TEST(Listener, SaysThatAnAddressIsNotOfThisMachine) {
  const auto listener = Listener::tcp("192.0.2.1", 0);  // TEST-NET-1
  ASSERT_FALSE(listener);
  EXPECT_THAT(listener.error().message, HasSubstr("--host 192.0.2.1"));
}

}  // namespace
}  // namespace quern::server
