#pragma once

namespace quern {

/// Several lambdas as one visitor of a variant: std::visit(Overloaded{[](A) {...}, [](B) {...}}, variant).
template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};
template <class... F>
Overloaded(F...) -> Overloaded<F...>;

}  // namespace quern
