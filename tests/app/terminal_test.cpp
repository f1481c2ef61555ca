#include "app/terminal.h"

#include <sys/stat.h>

#include "app/line_editor.h"
#include "app/progress.h"
#include "support/test_support.h"

namespace quern::app {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(PrintableText, ShowsWhatWouldCommandTheTerminal) {
  const auto shown = [](std::string_view text) { return PrintableText().feed(text); };
  EXPECT_EQ(shown("a\tb\nc"), "a\tb\nc");
  EXPECT_EQ(shown("\033[2J\033]0;title\007"), "␛[2J␛]0;title␇");
  EXPECT_EQ(shown("a\rb\x7f"), "a␍b␡");
  EXPECT_EQ(shown("\xc2\x9b"
                  "31m"),
            "␡31m")
      << "a C1 control is one, too";
  EXPECT_EQ(shown("\xff\xc0\xaf\xed\xa0\x80"), "\ufffd\ufffd\ufffd\ufffd\ufffd\ufffd");
  EXPECT_EQ(shown("\u202eabc"), "\ufffdabc") << "turned around";
  EXPECT_EQ(shown("é 你好 🙂"), "é 你好 🙂");
}

TEST(PrintableText, IsTheSameForEveryCut) {
  const std::string text =
      "é\033 你\xff🙂\xc2\x9b"
      "x\n";
  const std::string whole = PrintableText().feed(text);
  for (size_t a = 0; a <= text.size(); ++a) {
    for (size_t b = a; b <= text.size(); ++b) {
      PrintableText printable;
      std::string joined = printable.feed(text.substr(0, a));
      joined += printable.feed(text.substr(a, b - a));
      EXPECT_EQ(joined + printable.feed(text.substr(b)), whole) << a << " " << b;
    }
  }
}

TEST(CharacterWidth, KnowsWideAndCombiningOnes) {
  EXPECT_EQ(character_width('a'), 1);
  EXPECT_EQ(character_width(U'é'), 1);
  EXPECT_EQ(character_width(U'你'), 2);
  EXPECT_EQ(character_width(U'🙂'), 2);
  EXPECT_EQ(character_width(0x0301), 0);
}

TEST(EditedText, MovesAndErasesByCharactersWordsAndLines) {
  EditedText text;
  text.insert("é你 word");
  text.word_left();
  text.erase_word_before();
  EXPECT_EQ(text.text(), "word");
  text.insert("你");
  text.left();
  text.insert("x");
  text.right();
  text.erase_before();
  EXPECT_EQ(text.text(), "xword");
  text.line_end();
  text.insert("\nsecond line\nß");
  EXPECT_TRUE(text.up());
  text.line_begin();
  text.erase_at();
  EXPECT_EQ(text.text(), "xword\necond line\nß");
  text.erase_to_line_end();
  EXPECT_EQ(text.text(), "xword\n\nß");
  EXPECT_TRUE(text.up());
  EXPECT_FALSE(text.up());
  text.line_end();
  text.erase_to_line_begin();
  EXPECT_EQ(text.text(), "\n\nß");
  EXPECT_TRUE(text.down());
  EXPECT_TRUE(text.down());
  EXPECT_FALSE(text.down());
  text.erase_at();
  EXPECT_EQ(text.text(), "\n\n");
  text.right();
  text.erase_at();
  EXPECT_EQ(text.text(), "\n\n");
}

TEST(EditedText, StaysWithinItsTextAndOnCharacters) {
  EditedText text;
  text.set("a你\n🙂\n\néé");
  uint64_t random = 1;
  for (int i = 0; i < 20000; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    switch ((random >> 33) % 15) {
      case 0: text.left(); break;
      case 1: text.right(); break;
      case 2: text.word_left(); break;
      case 3: text.word_right(); break;
      case 4: text.line_begin(); break;
      case 5: text.line_end(); break;
      case 6: text.up(); break;
      case 7: text.down(); break;
      case 8: text.erase_before(); break;
      case 9: text.erase_at(); break;
      case 10: text.insert("你"); break;
      case 11: text.insert("\n"); break;
      case 12: text.insert("é x"); break;
      case 13: text.erase_word_before(); break;
      case 14: text.erase_to_line_end(); break;
    }
    ASSERT_LE(text.cursor(), text.text().size());
    ASSERT_THAT(PrintableText().feed(text.text()), Not(HasSubstr("\ufffd")));
    ASSERT_TRUE(text.cursor() == text.text().size() || (static_cast<unsigned char>(text.text()[text.cursor()]) & 0xc0) != 0x80);
  }
}

TEST(LineHistory, IsKeptInAFileForItsOwnerAlone) {
  const TemporaryFolder folder;
  const std::filesystem::path file = folder.path() / "state/quern/chat_history";
  {
    LineHistory history(file);
    history.add("first\nwith a line");
    history.add("second \"quoted\"");
    history.add("second \"quoted\"");
    history.add("");
  }
  struct stat status {};
  ASSERT_EQ(stat(file.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_THAT(LineHistory(file).entries(), ElementsAre("first\nwith a line", "second \"quoted\""));
  LineHistory long_one(file);
  for (int i = 0; i < 1500; ++i) long_one.add(fmt::format("{}", i));
  EXPECT_EQ(LineHistory(file).entries().size(), 1000u);
  EXPECT_EQ(LineHistory(file).entries().back(), "1499");
  LineHistory nowhere("/proc/no/such/file");
  nowhere.add("x");
  EXPECT_THAT(nowhere.entries(), ElementsAre("x"));
}

TEST(ProgressLine, FitsEveryWidthAndGivesUpTheBarFirst) {
  constexpr uint64_t kBytes = 29'500'000'000;
  EXPECT_EQ(progress_line("loading weights", 0.5, kBytes, 4, 100),
            "loading weights  [##############--------------]   50 %  13.74 GiB of 27.47 GiB  3.43 GiB/s  4 s left");
  EXPECT_EQ(progress_line("loading weights", 0.5, kBytes, 4, 80), "loading weights   50 %  13.74 GiB of 27.47 GiB  3.43 GiB/s  4 s left");
  for (int width = 0; width < 120; ++width) {
    for (const double share : {-1.0, 0.0, 0.123, 0.999, 1.0, 2.0})
      EXPECT_LE(progress_line("loading weights", share, kBytes, 3, width).size(), static_cast<size_t>(width));
  }
  EXPECT_THAT(progress_line("x", 0.999, kBytes, 3, 100), HasSubstr(" 99 %")) << "100 % is the end";
  EXPECT_THAT(progress_line("x", 1, kBytes, 3, 100), Not(HasSubstr("left")));
  EXPECT_THAT(progress_line("x", 0, kBytes, 0, 100), HasSubstr("[----"));
  EXPECT_EQ(progress_line("x", 0.25, 0, 9, 60), "x  [##########------------------------------]   25 %");
}

}  // namespace
}  // namespace quern::app
