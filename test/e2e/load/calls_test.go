package load

import (
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A recorder notes how long calls take and how they end. Times are those of the caller.
type recorder struct {
	mu      sync.Mutex
	methods map[string]*measured
}

type measured struct {
	took  []time.Duration
	codes map[codes.Code]int
}

func newRecorder() *recorder { return &recorder{methods: make(map[string]*measured)} }

// intercept is a grpc.UnaryClientInterceptor.
func (r *recorder) intercept(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	began := time.Now()
	err := invoke(ctx, method, request, reply, conn, options...)
	took := time.Since(began)
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.methods[path.Base(method)]
	if m == nil {
		m = &measured{codes: make(map[codes.Code]int)}
		r.methods[path.Base(method)] = m
	}
	m.took = append(m.took, took)
	m.codes[status.Code(err)]++
	return err
}

// count is how many calls there were.
func (r *recorder) count() (calls int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, m := range r.methods {
		calls += len(m.took)
	}
	return calls
}

// table summarises the calls by method.
func (r *recorder) table() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "%-28s %8s %10s %10s  %s\n", "method", "calls", "p50", "max", "answers")
	for _, method := range slices.Sorted(maps.Keys(r.methods)) {
		m := r.methods[method]
		slices.Sort(m.took)
		var answers []string
		for _, code := range slices.Sorted(maps.Keys(m.codes)) {
			answers = append(answers, fmt.Sprintf("%s %d", code, m.codes[code]))
		}
		fmt.Fprintf(&b, "%-28s %8d %10v %10v  %s\n", method, len(m.took), m.took[len(m.took)/2], m.took[len(m.took)-1], strings.Join(answers, ", "))
	}
	return b.String()
}
