package trace

import (
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// The fields of the messages, by opentelemetry/proto/trace/v1/trace.proto,
// common/v1/common.proto, resource/v1/resource.proto and
// collector/trace/v1/trace_service.proto of OTLP 1.x. The test reads what is made of the
// first three by the types that are generated from those files.
const (
	requestResourceSpans = 1

	resourceSpansResource   = 1
	resourceSpansScopeSpans = 2
	resourceAttributes      = 1

	scopeSpansScope = 1
	scopeSpansSpans = 2
	scopeName       = 1
	scopeVersion    = 2

	spanTraceID    = 1
	spanSpanID     = 2
	spanTraceState = 3
	spanParent     = 4
	spanName       = 5
	spanKind       = 6
	spanBegin      = 7
	spanEnd        = 8
	spanAttributes = 9
	spanStatus     = 15
	spanFlags      = 16

	statusMessage = 2
	statusCode    = 3
	statusError   = 2 // STATUS_CODE_ERROR

	responsePartialSuccess = 1
	partialRejectedSpans   = 1
	partialErrorMessage    = 2

	keyValueKey   = 1
	keyValueValue = 2
	anyText       = 1
	anyInt        = 3

	// flagsSampled is the W3C's, and flagsHasRemote says that flagsRemote means something.
	flagsSampled   = 0x001
	flagsHasRemote = 0x100
	flagsRemote    = 0x200
)

// A message is one that is being written.
type message []byte

func (m message) bytes(field protowire.Number, b []byte) message {
	if len(b) == 0 {
		return m
	}
	return protowire.AppendBytes(protowire.AppendTag(m, field, protowire.BytesType), b)
}

// text has to be UTF-8 in protobuf.
func (m message) text(field protowire.Number, s string) message {
	if s == "" {
		return m
	}
	return protowire.AppendString(protowire.AppendTag(m, field, protowire.BytesType), strings.ToValidUTF8(s, "\ufffd"))
}

func (m message) varint(field protowire.Number, n uint64) message {
	return protowire.AppendVarint(protowire.AppendTag(m, field, protowire.VarintType), n)
}

func (m message) fixed64(field protowire.Number, n uint64) message {
	return protowire.AppendFixed64(protowire.AppendTag(m, field, protowire.Fixed64Type), n)
}

func (m message) fixed32(field protowire.Number, n uint32) message {
	return protowire.AppendFixed32(protowire.AppendTag(m, field, protowire.Fixed32Type), n)
}

// request is an ExportTraceServiceRequest.
func request(config Config, spans []*Span) []byte {
	var resource, scopeSpans, scope, resourceSpans message
	for _, a := range config.resource() {
		resource = resource.bytes(resourceAttributes, a.encode())
	}
	scope = scope.text(scopeName, config.Service).text(scopeVersion, config.Version)
	scopeSpans = scopeSpans.bytes(scopeSpansScope, scope)
	for _, s := range spans {
		scopeSpans = scopeSpans.bytes(scopeSpansSpans, s.encode())
	}
	resourceSpans = resourceSpans.bytes(resourceSpansResource, resource).bytes(resourceSpansScopeSpans, scopeSpans)
	return message(nil).bytes(requestResourceSpans, resourceSpans)
}

func (s *Span) encode() message {
	var m message
	m = m.bytes(spanTraceID, s.parent.trace[:]).bytes(spanSpanID, s.id[:]).text(spanTraceState, s.parent.state)
	flags := uint32(flagsSampled | flagsHasRemote)
	if s.parent.span != [8]byte{} {
		m = m.bytes(spanParent, s.parent.span[:])
		if s.kind == Server {
			flags |= flagsRemote
		}
	}
	m = m.text(spanName, s.name).varint(spanKind, uint64(s.kind))
	m = m.fixed64(spanBegin, uint64(s.begin.UnixNano())).fixed64(spanEnd, uint64(s.end.UnixNano()))
	for _, a := range s.attributes {
		m = m.bytes(spanAttributes, a.encode())
	}
	if s.failed {
		m = m.bytes(spanStatus, message(nil).text(statusMessage, s.failure).varint(statusCode, statusError))
	}
	return m.fixed32(spanFlags, flags)
}

func (a attribute) encode() message {
	value := message(nil).text(anyText, a.text)
	if a.isNumber {
		value = message(nil).varint(anyInt, uint64(a.number))
	}
	return message(nil).text(keyValueKey, a.key).bytes(keyValueValue, value)
}

// readRejection reads an ExportTraceServiceResponse. It answers nil if that rejects nothing,
// or is none.
func readRejection(response []byte) *rejection {
	var r rejection
	fields(response, func(field protowire.Number, success []byte, _ uint64) {
		if field != responsePartialSuccess {
			return
		}
		fields(success, func(field protowire.Number, text []byte, n uint64) {
			switch field {
			case partialRejectedSpans:
				r.spans = n
			case partialErrorMessage:
				r.why = string(text)
			}
		})
	})
	if int64(r.spans) <= 0 {
		return nil
	}
	return &r
}

// fields goes through those of a message, up to what is no field. A field has bytes or a
// number; those of other types are left out.
func fields(m []byte, do func(field protowire.Number, b []byte, n uint64)) {
	for len(m) > 0 {
		field, kind, tag := protowire.ConsumeTag(m)
		if tag < 0 {
			return
		}
		size := protowire.ConsumeFieldValue(field, kind, m[tag:])
		if size < 0 {
			return
		}
		switch value := m[tag : tag+size]; kind {
		case protowire.BytesType:
			b, _ := protowire.ConsumeBytes(value)
			do(field, b, 0)
		case protowire.VarintType:
			n, _ := protowire.ConsumeVarint(value)
			do(field, nil, n)
		}
		m = m[tag+size:]
	}
}
