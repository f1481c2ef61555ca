#include "server/trace_context.h"

#include "support/test_support.h"

namespace quern::server {
namespace {

constexpr std::string_view kParent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(TraceContext, GoesOnWithTheSameTraceAndANewSpan) {
  const auto parent = TraceContext::parse(kParent);
  ASSERT_TRUE(parent);
  EXPECT_EQ(parent->traceparent(), kParent);
  const TraceContext first = parent->child(), second = parent->child();
  EXPECT_EQ(first.trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(first.flags, "01");
  EXPECT_NE(first.span_id, parent->span_id);
  EXPECT_NE(first.span_id, second.span_id);
  EXPECT_TRUE(TraceContext::parse(first.traceparent()));
}

TEST(TraceContext, WhatIsInvalidStartsNothing) {
  for (const std::string_view text : {"", "00", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
                                      "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",   // upper case
                                      "00-00000000000000000000000000000000-b7ad6b7169203331-01",   // no trace
                                      "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",   // no parent
                                      "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",   // forbidden version
                                      "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", // version 00 ends there
                                      "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
                                      "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01x",
                                      "00_0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331_01"}) {
    EXPECT_FALSE(TraceContext::parse(text)) << text;
  }
}

TEST(TraceContext, LaterVersionsAreReadAsFarAsTheyAreKnown) {
  const auto later = TraceContext::parse("01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more");
  ASSERT_TRUE(later);
  EXPECT_EQ(later->traceparent(), kParent);
}

}  // namespace
}  // namespace quern::server
