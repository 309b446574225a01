package trace

import (
	"encoding/hex"
	"strings"
	"testing"
)

// What is taken of a caller's header is in it, word for word.
func FuzzParseParent(f *testing.F) {
	f.Add(aParent, "vendor=1")
	f.Add("01-"+aTrace+"-"+aSpan+"-00-more", "")
	f.Add("ff-"+aTrace+"-"+aSpan+"-01", "")
	f.Add("00---", strings.Repeat("x", maxState+1))
	f.Fuzz(func(t *testing.T, traceparent, tracestate string) {
		p := ParseParent(traceparent, tracestate)
		if p == (Parent{}) {
			return
		}
		if want := "-" + hex.EncodeToString(p.trace[:]) + "-" + hex.EncodeToString(p.span[:]) + "-"; strings.Index(traceparent, want) != 2 {
			t.Errorf("%q is taken as %s", traceparent, want)
		}
		if len(p.state) > maxState || p.state != "" && p.state != tracestate {
			t.Errorf("the state %q is taken as %q", tracestate, p.state)
		}
	})
}
