package blockdev

import (
	"context"
	"errors"
	"sync"
	"time"

	"kubevirt.io/hostpath-provisioner/pkg/hostfs/hang"
)

// patience is how long an answer may take.
const patience = 2 * time.Second

func newQuestions[T any]() questions[T] {
	return questions[T]{overdue: make(map[string]*question[T])}
}

// questions are those to servers of filesystems that have not been answered. A server that has not is not asked again meanwhile.
type questions[T any] struct {
	mu      sync.Mutex
	overdue map[string]*question[T]
}

type question[T any] struct {
	*hang.Call[T]
	asked time.Time
}

// silent is for how long a server has not answered.
func (q *questions[T]) silent(server string) time.Duration {
	q.mu.Lock()
	defer q.mu.Unlock()
	if before := q.overdue[server]; before != nil {
		return time.Since(before.asked)
	}
	return 0
}

// ask returns hang.ErrTimeout if there is no answer.
func (q *questions[T]) ask(server string, what func() (T, error)) (answer T, err error) {
	q.mu.Lock()
	before := q.overdue[server]
	q.mu.Unlock()
	if before != nil {
		if _, err := before.Wait(context.Background(), time.Millisecond); errors.Is(err, hang.ErrTimeout) {
			return answer, err
		}
	}
	call := &question[T]{hang.Start(what), time.Now()}
	answer, err = call.Wait(context.Background(), patience)
	q.mu.Lock()
	defer q.mu.Unlock()
	switch late := errors.Is(err, hang.ErrTimeout); {
	case late && (q.overdue[server] == nil || q.overdue[server] == before):
		q.overdue[server] = call
	case late:
		call.Abandon(nil) // another search has just asked too
	case q.overdue[server] == before:
		delete(q.overdue, server)
	}
	return answer, err
}
