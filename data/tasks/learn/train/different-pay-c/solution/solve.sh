sqlite3 c.db 'select count(distinct pay) from t' > answer.txt
