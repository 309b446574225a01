package quota

import (
	"errors"
	"testing"
)

func TestFreeID(t *testing.T) {
	errAsk := errors.New("asked in vain")
	for name, c := range map[string]struct {
		from ID
		free func(ID) bool
		want ID // 0 for any that is free
		err  error
		asks int // at most
	}{
		"the first":                {FirstID, func(ID) bool { return true }, FirstID, nil, 1},
		"the lowest after some":    {FirstID, func(id ID) bool { return id >= FirstID+40 }, FirstID + 40, nil, 41},
		"not below the first":      {FirstID + 7, func(ID) bool { return true }, FirstID + 7, nil, 1},
		"past a million in a row":  {FirstID, func(id ID) bool { return id > FirstID+1_000_000 }, 0, nil, 2 * inARow},
		"the last of all":          {FirstID, func(id ID) bool { return id == LastID }, LastID, nil, int(LastID - FirstID + 1 + inARow)},
		"the last, asked for":      {LastID, func(ID) bool { return true }, LastID, nil, 1},
		"none":                     {LastID - 200, func(ID) bool { return false }, 0, ErrNoID, 201 + inARow},
		"none after the last":      {LastID, func(ID) bool { return false }, 0, ErrNoID, 1},
		"a filesystem that is bad": {FirstID, nil, 0, errAsk, 1},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			id, err := freeID(c.from, func(id ID) (bool, error) {
				asked++
				if id < c.from || id > LastID {
					t.Errorf("asked about %d, which is not between %d and %d", id, c.from, LastID)
				}
				if c.free == nil {
					return false, errAsk
				}
				return c.free(id), nil
			})
			if !errors.Is(err, c.err) || asked > c.asks {
				t.Errorf("%v after %d questions, want %v after %d at most", err, asked, c.err, c.asks)
			}
			if err == nil && (c.want != 0 && id != c.want || !c.free(id)) {
				t.Errorf("the id is %d, want %d", id, c.want)
			}
		})
	}
}
