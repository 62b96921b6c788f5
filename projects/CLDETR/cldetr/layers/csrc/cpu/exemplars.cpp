// The inner loop of the greedy exemplar choice, cldetr/data/greedy_kl.py, for one thread.
//
// Python holds the rules (uncovered classes, ties, images without labels) and the state; this loop
// takes choice after choice as long as each is beyond doubt, and changes the state in place.
//
// Shape shorthand: G candidates in order of size, S distinct sizes, C columns, J non-zero counts.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace cldetr {
namespace {

using std::int64_t;

constexpr double kLowest = -std::numeric_limits<double>::infinity();
constexpr double kUnit = std::numeric_limits<double>::epsilon() / 2;  // rounding of one operation

template <typename T>
T* data(const at::Tensor& tensor, int64_t length, const char* name) {
  constexpr auto type = c10::CppTypeToScalarType<T>::value;
  TORCH_CHECK(tensor.device().is_cpu() && tensor.scalar_type() == type && tensor.dim() == 1 &&
                  tensor.is_contiguous() && tensor.numel() == length,
              "exemplar_run: ", name, " must be a contiguous CPU tensor of ", length, " ", type);
  return tensor.data_ptr<T>();
}

// Checks that starts[0] = 0 ≤ starts[1] ≤ … ≤ starts[n] = total.
void check_starts(const int64_t* starts, int64_t n, int64_t total, const char* name) {
  bool good = starts[0] == 0 && starts[n] == total;
  for (int64_t i = 0; i < n; ++i) good = good && starts[i] <= starts[i + 1];
  TORCH_CHECK(good, "exemplar_run: ", name, " must ascend from 0 to ", total);
}

void check_below(const int64_t* values, int64_t n, int64_t bound, const char* name) {
  const bool good = std::all_of(values, values + n, [=](int64_t v) { return 0 <= v && v < bound; });
  TORCH_CHECK(good, "exemplar_run: ", name, " must be in [0, ", bound, ")");
}

double highest(const double* first, const double* last) {
  // Four accumulators: a single one would wait for itself at every comparison.
  double a = kLowest, b = kLowest, c = kLowest, d = kLowest;
  for (; last - first >= 4; first += 4) {
    a = first[0] > a ? first[0] : a;
    b = first[1] > b ? first[1] : b;
    c = first[2] > c ? first[2] : c;
    d = first[3] > d ? first[3] : d;
  }
  for (; first != last; ++first) a = *first > a ? *first : a;
  return std::max(std::max(a, b), std::max(c, d));
}

// Chooses candidates until `limit` choices, until `max_updates` updates of the gains, or until
// rounding leaves a doubt about which is best (perhaps at once: the result may be empty).
//
//   gain (G)             Σ_c weights[c] · log1p(k_c / held[c]); −inf where no image is left
//   held (C), left (G)   objects held of each column; images left of each candidate
//   size_starts (S + 1)  candidates of size sizes[s] stand at size_starts[s]:size_starts[s + 1]
//   row_*                each candidate's columns and counts, as CSR
//   holder_*             each column's candidates and counts, as CSR: the transpose
//   total                T, objects held in all
//   top_gain             the highest gain when the gains were last summed
//   updates              updates of the gains since then
at::Tensor exemplar_run(at::Tensor gain, at::Tensor held, at::Tensor left, const at::Tensor& sizes,
                        const at::Tensor& size_starts, const at::Tensor& row_starts,
                        const at::Tensor& row_columns, const at::Tensor& row_counts,
                        const at::Tensor& holder_starts, const at::Tensor& holder_candidates,
                        const at::Tensor& holder_counts, const at::Tensor& weights, int64_t total,
                        double top_gain, int64_t updates, int64_t max_updates, int64_t limit) {
  const int64_t G = gain.numel(), C = held.numel(), S = sizes.numel(), J = row_columns.numel();
  double* const g = data<double>(gain, G, "gain");
  int64_t* const E = data<int64_t>(held, C, "held");
  int64_t* const images = data<int64_t>(left, G, "left");
  const int64_t* const n = data<int64_t>(sizes, S, "sizes");
  const int64_t* const from = data<int64_t>(size_starts, S + 1, "size_starts");
  const int64_t* const row = data<int64_t>(row_starts, G + 1, "row_starts");
  const int64_t* const columns = data<int64_t>(row_columns, J, "row_columns");
  const int64_t* const counts = data<int64_t>(row_counts, J, "row_counts");
  const int64_t* const holder = data<int64_t>(holder_starts, C + 1, "holder_starts");
  const int64_t* const holders = data<int64_t>(holder_candidates, J, "holder_candidates");
  const int64_t* const numbers = data<int64_t>(holder_counts, J, "holder_counts");
  const double* const w = data<double>(weights, C, "weights");
  check_starts(from, S, G, "size_starts");
  check_starts(row, G, J, "row_starts");
  check_starts(holder, C, J, "holder_starts");
  check_below(columns, J, C, "row_columns");
  check_below(holders, J, G, "holder_candidates");
  check_below(numbers, J, std::int64_t{1} << 31, "holder_counts");

  std::vector<int64_t> most(C, 0);  // the highest count of each column
  for (int64_t c = 0; c < C; ++c) {
    for (int64_t i = holder[c]; i < holder[c + 1]; ++i) most[c] = std::max(most[c], numbers[i]);
  }

  std::vector<int64_t> chosen;
  std::vector<double> penalty(S), best(S), change;
  while (static_cast<int64_t>(chosen.size()) < limit && updates < max_updates) {
    double top = kLowest;
    for (int64_t s = 0; s < S; ++s) {
      penalty[s] = std::log1p(static_cast<double>(n[s]) / static_cast<double>(total));
      best[s] = highest(g + from[s], g + from[s + 1]) - penalty[s];
      top = std::max(top, best[s]);
    }
    // As in greedy_kl.py: what the roundings since the last fresh sum can amount to.
    const double roundings = static_cast<double>(C + 8 + 10 * updates);
    const double bound = top - 2 * kUnit * (roundings * top_gain + 4 * penalty[S - 1]);
    int64_t winner = -1, size = 0, close = 0;
    for (int64_t s = 0; s < S; ++s) {
      if (best[s] < bound) continue;
      for (int64_t i = from[s]; i < from[s + 1]; ++i) {
        if (g[i] - penalty[s] >= bound) {
          winner = i;
          size = s;
          ++close;
        }
      }
    }
    if (close != 1 || images[winner] < 1) break;

    chosen.push_back(winner);
    if (--images[winner] == 0) g[winner] = kLowest;
    total += n[size];
    for (int64_t j = row[winner]; j < row[winner + 1]; ++j, ++updates) {
      const int64_t c = columns[j], before = E[c], after = before + counts[j];
      E[c] = after;
      change.assign(most[c] + 1, 0.0);
      for (int64_t k = 1; k <= most[c]; ++k) {
        change[k] = w[c] * (std::log1p(static_cast<double>(k) / static_cast<double>(after)) -
                            std::log1p(static_cast<double>(k) / static_cast<double>(before)));
      }
      const double* const step = change.data();
      for (int64_t i = holder[c]; i < holder[c + 1]; ++i) g[holders[i]] += step[numbers[i]];
    }
  }
  at::Tensor result = at::empty({static_cast<int64_t>(chosen.size())}, at::kLong);
  std::copy(chosen.begin(), chosen.end(), result.mutable_data_ptr<int64_t>());
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(cldetr, m) {
  m.def(
      "exemplar_run(Tensor(a!) gain, Tensor(b!) held, Tensor(c!) left, Tensor sizes, "
      "Tensor size_starts, Tensor row_starts, Tensor row_columns, Tensor row_counts, "
      "Tensor holder_starts, Tensor holder_candidates, Tensor holder_counts, Tensor weights, "
      "int total, float top_gain, int updates, int max_updates, int limit) -> Tensor");
}

TORCH_LIBRARY_IMPL(cldetr, CPU, m) { m.impl("exemplar_run", exemplar_run); }

}  // namespace cldetr
